"use strict";

const element = (id) => document.getElementById(id);
const annotator = (new URLSearchParams(location.search).get("annotator") ?? "").trim();
const KEYS = { 1: "a", 2: "b", 3: "tie", 4: "bad", ArrowLeft: "a", ArrowRight: "b", u: "undo" };
let pair = null; // the one on the page
let last = null; // the id of the one before, which can be undone
let busy = false; // a request is under way: a second click does nothing

// Texts come from models and people: they are set as text, never as HTML.
function add(parent, tag, text, style = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  made.className = style;
  parent.append(made);
}

async function ask(path, body) {
  const post = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  const response = await fetch(path, { cache: "no-store", ...(body && post) });
  const answer = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(typeof answer.detail === "string" ? answer.detail : response.statusText);
  return answer;
}

function show(state) {
  pair = state.pair;
  last = state.last[0] ?? null;
  element("progress").max = state.of;
  element("progress").value = state.done;
  element("count").textContent = `${annotator}: ${state.done} of ${state.of}`;
  element("undo").disabled = last === null;
  element("pair").hidden = pair === null;
  element("question").textContent = pair ? "Which answer is better?" : "All pairs are done. Thank you.";
  element("prompt").replaceChildren();
  for (const turn of pair?.prompt ?? []) {
    add(element("prompt"), "h2", turn.role[0].toUpperCase() + turn.role.slice(1));
    add(element("prompt"), "p", turn.content, "text");
  }
  element("a").textContent = pair?.answers[0] ?? "";
  element("b").textContent = pair?.answers[1] ?? "";
  element("reason").value = "";
  element("question").focus({ preventScroll: true }); // a screen reader starts there
  scrollTo(0, 0);
  if (element("results").open || pair === null) showResults();
}

async function showResults() {
  const found = await ask("results").catch((error) => [["No results", error.message]]);
  element("found").replaceChildren();
  for (const [name, text] of found) {
    add(element("found"), "dt", name);
    add(element("found"), "dd", text);
  }
  element("results").open = true;
}

async function act(choice) {
  const id = choice === "undo" ? last : pair?.id;
  if (busy || !id) return;
  busy = true;
  try {
    show(await ask("vote", { annotator, pair: id, choice, reason: element("reason").value }));
    element("status").textContent = "";
  } catch (error) {
    element("status").textContent = `Not saved: ${error.message}. Try again.`;
  } finally {
    busy = false;
  }
}

function press(event) {
  if (event.repeat || event.ctrlKey || event.altKey || event.metaKey) return;
  const writes = event.target === element("reason");
  if (writes && (event.key === "Enter" || event.key === "Escape")) element("question").focus();
  else if (!writes && event.key === "r" && pair) element("reason").focus();
  else if (!writes && KEYS[event.key]) act(KEYS[event.key]);
  else return;
  event.preventDefault();
}

if (window.top !== window) {
  document.body.textContent = "This page does not work in a frame of another page.";
} else if (annotator) {
  element("work").hidden = false;
  for (const button of document.querySelectorAll("[data-choice]")) {
    button.addEventListener("click", () => act(button.dataset.choice));
  }
  element("undo").addEventListener("click", () => act("undo"));
  element("results").addEventListener("toggle", () => element("results").open && showResults());
  document.addEventListener("keydown", press);
  ask(`state?annotator=${encodeURIComponent(annotator)}`).then(show, (error) => {
    element("status").textContent = `The server does not answer: ${error.message}.`;
  });
} else {
  element("who").hidden = false;
}
