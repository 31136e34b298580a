// The form as a request, and a request as the form.

const byId = (id) => document.getElementById(id);
const NOUL = ["true", "false"];

export const pictures = []; // {content_type, base64}, as they are sent

export function addQuestion(id = "", question = { type: "noul" }) {
  const part = byId("question-template").content.cloneNode(true).firstElementChild;
  const type = part.querySelector(".type");
  part.querySelector(".id").value = id;
  type.value = question.type;
  part.querySelector(".instructions").value = asText(question.instructions);
  setOptions(part, question.criteria);
  type.addEventListener("change", () => setOptions(part, null));
  part.querySelector(".remove").addEventListener("click", () => { part.remove(); byId("add-question").focus(); });
  part.querySelector(".add-option").addEventListener("click", () => addOption(part, "", "").querySelector("input:not([readonly])").focus());
  byId("questions").append(part);
  return part;
}

function setOptions(part, criteria) {
  const type = part.querySelector(".type").value;
  part.querySelector(".options").replaceChildren();
  const more = part.querySelector(".add-option");
  more.hidden = type === "noul";
  more.textContent = type === "choice" ? "+ option" : "+ level";
  if (type === "noul") {
    for (const name of NOUL) addOption(part, name, asText(criteria?.[name]));
  } else if (type === "choice") {
    const options = Object.entries(criteria ?? { "": null, " ": null });
    for (const [name, description] of options) addOption(part, name.trim(), asText(description));
  } else {
    for (const level of criteria ?? ["", ""]) addOption(part, "", asText(level));
  }
}

function addOption(part, name, description) {
  const type = part.querySelector(".type").value;
  const row = byId("option-template").content.cloneNode(true).firstElementChild;
  const [first, second, remove] = row.children;
  first.value = type === "noul" ? { true: "yes", false: "no" }[name] : name;
  first.dataset.name = name;
  first.readOnly = type !== "choice";
  if (first.readOnly) first.tabIndex = -1;
  first.placeholder = "option";
  first.setAttribute("aria-label", type === "choice" ? "Option" : type === "noul" ? "Answer" : "Level");
  second.value = description;
  second.placeholder = type === "score" ? "what this level means" : "when it is right (optional)";
  second.setAttribute("aria-label", "Description");
  remove.hidden = type === "noul";
  remove.setAttribute("aria-label", "Remove this option");
  remove.addEventListener("click", () => { row.remove(); numberLevels(part); });
  part.querySelector(".options").append(row);
  numberLevels(part);
  return row;
}

function numberLevels(part) {
  if (part.querySelector(".type").value !== "score") return;
  part.querySelectorAll(".option .name").forEach((input, level) => { input.value = level; });
}

export function readForm() {
  const questions = {};
  for (const part of document.querySelectorAll(".question")) {
    const question = { type: part.querySelector(".type").value };
    const instructions = part.querySelector(".instructions").value;
    if (instructions) question.instructions = asValue(instructions);
    const rows = [...part.querySelectorAll(".option")].map((row) => [row.children[0], asValue(row.children[1].value)]);
    if (question.type === "noul") {
      const told = rows.filter(([, description]) => description !== "");
      if (told.length) question.criteria = Object.fromEntries(told.map(([input, description]) => [input.dataset.name, description]));
    } else if (question.type === "choice") {
      question.criteria = Object.fromEntries(rows.map(([input, description]) => [input.value, description === "" ? null : description]));
    } else {
      question.criteria = rows.map(([, description]) => description);
    }
    questions[part.querySelector(".id").value] = question;
  }
  const request = { model: "clef", state: asValue(byId("state").value), questions };
  if (pictures.length) request.images = [...pictures];
  return request;
}

export function writeForm(request) {
  byId("state").value = asText(request.state);
  byId("questions").replaceChildren();
  for (const [id, question] of Object.entries(request.questions ?? {})) addQuestion(id, question);
  pictures.splice(0, pictures.length, ...(request.images ?? []));
  drawPictures();
}

export function drawPictures() {
  const buttons = pictures.map((picture, index) => {
    const button = document.createElement("button");
    button.type = "button";
    button.setAttribute("aria-label", `Remove picture ${index + 1}`);
    const image = document.createElement("img");
    image.alt = "";
    image.src = URL.createObjectURL(new Blob([bytesOf(picture.base64)], { type: picture.content_type }));
    image.addEventListener("load", () => URL.revokeObjectURL(image.src), { once: true });
    const cross = document.createElement("span");
    cross.textContent = "✕";
    button.append(image, cross);
    button.addEventListener("click", () => { pictures.splice(index, 1); drawPictures(); });
    return button;
  });
  byId("thumbnails").replaceChildren(...buttons);
}

export async function addPictures(files) {
  for (const file of files) {
    const base64 = await new Promise((resolve, reject) => {
      const reader = new FileReader();
      reader.addEventListener("load", () => resolve(reader.result.slice(reader.result.indexOf(",") + 1)));
      reader.addEventListener("error", () => reject(reader.error));
      reader.readAsDataURL(file);
    });
    pictures.push({ content_type: file.type, base64 });
  }
  drawPictures();
}

function bytesOf(base64) {
  return Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
}

// A text that is a JSON object or array is sent as one; any other as it stands.
function asValue(text) {
  if (!/^\s*[[{]/.test(text)) return text;
  try { return JSON.parse(text); } catch { return text; }
}

function asText(value) {
  return value === undefined || value === null ? "" : typeof value === "string" ? value : JSON.stringify(value, null, 1);
}
