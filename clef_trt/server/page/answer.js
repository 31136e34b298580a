// A response as bars, its times as a strip, a refusal as a list of places.

const STAGES = { queue: "waiting", encode: "encoding", run: "model", answer: "answer", rest: "network and browser" };

function element(name, text = "", kind = "") {
  const made = document.createElement(name);
  if (text !== "") made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

const percent = (value) => `${(100 * value).toFixed(1)} %`;

function reading(answer) {
  if (answer.type === "noul") {
    return { said: answer.noul >= 0.5 ? "yes" : "no", options: [["yes", answer.noul], ["no", 1 - answer.noul]] };
  }
  const options = Object.entries(answer.probabilities);
  if (answer.type === "choice") return { said: answer.choice, options, best: answer.choice };
  const named = options.map(([level, value]) => [`${level} · ${asText(answer.legend[level])}`, value]);
  return { said: `${answer.score.toFixed(2)} of ${options.length - 1}`, options: named };
}

function asText(value) {
  return typeof value === "string" ? value : JSON.stringify(value);
}

function drawAnswer(id, answer, instructions) {
  const { said, options, best } = reading(answer);
  const top = best ?? options.reduce((a, b) => (b[1] > a[1] ? b : a))[0];
  const part = element("article", "", "answer");
  const title = element("h3");
  title.append(element("span", instructions ? asText(instructions) : id, "asked"), element("span", said, "said"));
  const bars = element("ul", "", "bars");
  for (const [name, value] of options) {
    const bar = element("li", "", name === top ? "best" : "");
    const fill = element("div", "", "fill");
    fill.style.width = "0";
    requestAnimationFrame(() => { fill.style.width = `${100 * value}%`; });
    bar.append(fill, element("span", name, "name"), element("span", percent(value), "value"));
    bars.append(bar);
  }
  part.append(title, bars);
  if (answer.confidence !== undefined) part.append(element("p", `confidence ${percent(answer.confidence)}`, "sure"));
  return part;
}

function drawTimes(header, totalMs, usage, requestId) {
  const spent = Object.fromEntries((header ?? "").split(", ").filter(Boolean).map((part) => part.split(";dur=")).map(([name, ms]) => [name, Number(ms)]));
  spent.rest = Math.max(totalMs - Object.values(spent).reduce((a, b) => a + b, 0), 0);
  const part = element("section", "", "times");
  const strip = element("div", "", "strip");
  strip.setAttribute("aria-hidden", "true");
  const list = element("ul");
  for (const [stage, name] of Object.entries(STAGES)) {
    if (!(stage in spent)) continue;
    const kind = stage === "answer" ? "reply" : stage;
    const piece = element("div", "", kind);
    piece.style.flexGrow = spent[stage];
    strip.append(piece);
    list.append(element("li", `${name} ${spent[stage].toFixed(1)} ms`, kind));
  }
  const cut = usage.truncated_state_tokens ? `, ${usage.truncated_state_tokens} of the state cut` : "";
  part.append(strip, list, element("p", `${totalMs.toFixed(1)} ms in all · ${usage.input_tokens} tokens${cut} · request ${requestId}`));
  return part;
}

export function drawResponse(place, request, response, times) {
  const answers = Object.entries(response.answers).map(([id, answer]) => drawAnswer(id, answer, request.questions[id]?.instructions));
  place.replaceChildren(...answers, drawTimes(times.header, times.totalMs, response.usage, times.requestId));
}

export function drawRefusal(place, title, detail) {
  const part = element("div", "", "refused");
  part.setAttribute("role", "alert");
  part.append(element("h3", title));
  if (Array.isArray(detail)) {
    const list = element("ul");
    for (const fault of detail) list.append(element("li", `${fault.loc.slice(1).join(".") || "request"}: ${fault.msg}`));
    part.append(list);
  } else if (detail) {
    part.append(element("p", detail));
  }
  place.replaceChildren(part);
}
