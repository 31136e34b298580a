// What happens on the page: examples, the two ways to write a request, pictures, and the question to the server.

import { addPictures, addQuestion, readForm, writeForm } from "./form.js";
import { drawRefusal, drawResponse } from "./answer.js";

const byId = (id) => document.getElementById(id);
let asJson = false;

function currentRequest() {
  return asJson ? JSON.parse(byId("json").value) : readForm();
}

function show(json) {
  if (json === asJson) return;
  try {
    if (json) byId("json").value = JSON.stringify(readForm(), null, 2);
    else writeForm(JSON.parse(byId("json").value));
  } catch (fault) {
    drawRefusal(byId("result"), "The JSON cannot be shown as a form", String(fault.message ?? fault));
    return;
  }
  asJson = json;
  byId("form-view").hidden = json;
  byId("json-view").hidden = !json;
  byId("as-form").setAttribute("aria-pressed", String(!json));
  byId("as-json").setAttribute("aria-pressed", String(json));
}

function headers() {
  const key = byId("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function decide(event) {
  event?.preventDefault();
  const button = byId("decide"), result = byId("result");
  if (button.disabled) return;
  button.disabled = true;
  result.setAttribute("aria-busy", "true");
  try {
    const request = currentRequest();
    const begun = performance.now();
    const response = await fetch("v1/systemone", { method: "POST", headers: headers(), body: JSON.stringify(request) });
    const text = await response.text();
    const times = {
      totalMs: performance.now() - begun,
      header: response.headers.get("Server-Timing"),
      requestId: response.headers.get("x-request-id"),
    };
    if (response.ok) {
      drawResponse(result, request, JSON.parse(text), times);
    } else {
      let detail = text;
      try { detail = JSON.parse(text).detail; } catch { /* plain text */ }
      const after = response.headers.get("Retry-After");
      drawRefusal(result, `Not answered (${response.status})${after ? `, try again in ${after} s` : ""}`, detail);
      if (response.status === 401) byId("key").closest("details").open = true;
    }
  } catch (fault) {
    drawRefusal(result, fault instanceof SyntaxError ? "The request is not JSON" : "The server gave no answer", String(fault.message));
  } finally {
    button.disabled = false;
    result.removeAttribute("aria-busy");
    if (matchMedia("(max-width: 820px)").matches) result.scrollIntoView({ block: "start" });
  }
}

async function tellModel() {
  const place = byId("model");
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (response.ok) place.textContent = (await response.json()).models[0].description;
    else place.textContent = response.status === 401 ? "this server wants an API key" : "the model is loading …";
    if (response.status === 503) setTimeout(tellModel, 2000);
  } catch {
    place.textContent = "the server is not there";
  }
}

async function loadExamples() {
  const examples = await (await fetch("page/examples.json")).json();
  const select = byId("example");
  examples.forEach((request, index) => {
    const state = request.state;
    const name = typeof state === "string" ? state : state.subject ?? Object.keys(request.questions).join(", ");
    select.append(new Option(`${name.slice(0, 60)}${request.images ? " (picture)" : ""}`, index));
  });
  const choose = () => {
    const request = examples[select.value];
    if (asJson) byId("json").value = JSON.stringify(request, null, 2);
    else writeForm(request);
  };
  select.addEventListener("change", choose);
  choose();
}

function takePictures() {
  const drop = byId("pictures");
  const over = (is) => drop.classList.toggle("over", is);
  byId("picture").addEventListener("change", async (event) => {
    await addPictures(event.target.files);
    event.target.value = "";
  });
  drop.addEventListener("dragover", (event) => { event.preventDefault(); over(true); });
  drop.addEventListener("dragleave", () => over(false));
  drop.addEventListener("drop", (event) => {
    event.preventDefault();
    over(false);
    addPictures([...event.dataTransfer.files].filter((file) => file.type.startsWith("image/")));
  });
}

byId("ask").addEventListener("submit", decide);
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) decide(event);
});
byId("as-form").addEventListener("click", () => show(false));
byId("as-json").addEventListener("click", () => show(true));
byId("add-question").addEventListener("click", () => addQuestion().querySelector(".id").focus());
byId("key").addEventListener("change", tellModel);
takePictures();
tellModel();
await loadExamples();
