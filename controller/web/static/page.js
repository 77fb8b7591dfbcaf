// The page: loads everything once, follows the changes, and draws what is in view.
import { age, counted, element, evictionRow, fillNode, grouped, legend, nodeDetail, nodeFrame, pendingRow, printable, productRow, setClock } from "/drawing.js";

const FIRST_FILLED = 16; // nodes that are drawn at once; others when they come into view
const MAX_ROWS = 100; // nodes, and rows of pending claims, that are shown at once; a search finds the others
const SILENCE_MS = 40_000; // the server sends something every 15 s
const MAX_DELAY_MS = 15_000;

const find = (id) => document.getElementById(id);
const state = { nodes: new Map(), classes: [], products: [], pending: [], pendingCount: 0, evictions: [], stale: null };
const frames = new Map(); // by name of the node
const groups = new WeakMap(); // the pending claims of a row
const texts = new WeakMap(); // what the search looks at, by node or pending claim
let token = "";
let version = "";
let opened = null; // the node of the detail panel: {name, devices, problem}

// ---- what the server sends

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function request(path, options = {}) {
  const headers = { ...options.headers, ...(token ? { Authorization: `Bearer ${token}` } : {}) };
  const response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit", redirect: "error" });
  if (response.ok) return response;
  const answer = await response.json().catch(() => ({ message: response.statusText }));
  throw new Refused(response.status, answer.message);
}

async function follow() {
  for (let delay = 1000; ; delay = Math.min(2 * delay, MAX_DELAY_MS)) {
    try {
      if (!version) {
        const response = await request("/api/state");
        setClock(response.headers.get("Date"));
        apply(await response.json(), true);
      }
      show("live");
      await readChanges(() => (delay = 1000));
      version = "";
    } catch (error) {
      if (error instanceof Refused && (error.status === 401 || error.status === 403)) {
        await askForToken(error.message);
        delay = 500;
        continue;
      }
      show("lost", error instanceof Refused ? error.message : "connection lost");
    }
    await new Promise((resolve) => setTimeout(resolve, delay));
  }
}

/** Reads server-sent events until the stream ends. fetch() instead of EventSource, which can't send a token. */
async function readChanges(received) {
  const abort = new AbortController();
  let timer = setTimeout(() => abort.abort(), SILENCE_MS);
  try {
    const response = await request("/api/changes", { signal: abort.signal, headers: { "Last-Event-ID": version } });
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = ""; ; ) {
      const { value, done } = await reader.read();
      if (done) return;
      clearTimeout(timer);
      timer = setTimeout(() => abort.abort(), SILENCE_MS);
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const lines = event.split("\n");
        if (lines[0] === "event: reload") return;
        const data = lines.find((line) => line.startsWith("data: "));
        if (data) apply(JSON.parse(data.slice(6)), false);
      }
      received();
    }
  } finally {
    clearTimeout(timer);
    abort.abort();
  }
}

/** Takes over a state or a change, and draws what differs. */
function apply(update, isComplete) {
  version = update.version;
  if (isComplete) state.nodes.clear();
  for (const name of update.removed) state.nodes.delete(name);
  for (const node of update.nodes) state.nodes.set(node.name, node);
  for (const part of ["classes", "products", "pending", "pendingCount", "evictions", "stale"]) {
    if (part in update) state[part] = update[part];
  }
  if (isComplete || "products" in update) find("products").replaceChildren(...state.products.map(productRow));
  if (isComplete || "pending" in update || "pendingCount" in update) drawPending();
  if ("evictions" in update) find("evictions").replaceChildren(...state.evictions.slice(-MAX_ROWS).reverse().map(evictionRow));
  if ("classes" in update) find("legend").replaceChildren(...legend(state.classes));
  drawNodes(isComplete || "classes" in update ? null : new Set(update.nodes.map((node) => node.name)));
  if (opened !== null) drawDetail();
  show("live");
}

// ---- nodes

const observer = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) fill(entry.target);
}, { rootMargin: "800px" });

function fill(frame) {
  observer.unobserve(frame);
  frame.dataset.filled = "yes";
  fillNode(frame, state.nodes.get(frame.dataset.node), state.classes);
}

/** Draws the `changed` nodes, null for all: those that were in view before, and the first ones. */
function drawNodes(changed) {
  const place = find("nodes");
  for (const [name, frame] of frames) {
    if (!state.nodes.has(name)) {
      observer.unobserve(frame);
      frame.remove();
      frames.delete(name);
    }
  }
  const names = [...state.nodes.keys()].sort();
  const added = document.createDocumentFragment();
  names.forEach((name, index) => {
    let frame = frames.get(name);
    if (frame === undefined) {
      frame = nodeFrame(state.nodes.get(name), openDetail);
      frames.set(name, frame);
      if (index < FIRST_FILLED) fill(frame);
      else observer.observe(frame);
      const next = place.children[index];
      if (next) place.insertBefore(frame, next);
      else added.append(frame);
    } else if (frame.dataset.filled && (changed === null || changed.has(name))) {
      fill(frame);
    }
  });
  place.append(added);
  filter();
}

// ---- search

const words = () => find("search").value.toLowerCase().split(/\s+/).filter(Boolean);

function matches(item, terms, describe) {
  if (!texts.has(item)) texts.set(item, describe(item).join(" ").toLowerCase());
  return terms.every((term) => texts.get(item).includes(term));
}

const textsOfNode = (node) => [node.name, ...node.states, ...node.gpus.flatMap((gpu) => [
  gpu.product, gpu.uuid, gpu.fabricClique ?? "", gpu.fault ?? "",
  ...gpu.spans.flatMap((span) => (span.holder ? [`${span.holder.namespace}/${span.holder.claim}`, span.holder.deviceClass ?? ""] : [])),
])];
const textsOfPending = (each) => [each.claim ?? "", ...each.pods, each.workload ?? "", each.reason];

/** Shows the first rows that match, and says in `line` how many more do. Returns how many match. */
function showFirst(rows, matching, line, noun, command) {
  let count = 0;
  for (const row of rows) {
    const isMatch = matching(row);
    row.hidden = !isMatch || count >= MAX_ROWS;
    count += isMatch ? 1 : 0;
  }
  find(line).hidden = count <= MAX_ROWS;
  find(line).textContent = `${counted(count - MAX_ROWS, `more ${noun}`)}: search for a name, or run ${command}`;
  return count;
}

function filter() {
  const terms = words();
  const isMatch = (frame) => matches(state.nodes.get(frame.dataset.node), terms, textsOfNode);
  const count = showFirst(find("nodes").children, isMatch, "more-nodes", "node", "tessera map --all");
  find("node-count").textContent = terms.length ? `${count} of ${frames.size}` : String(frames.size);
  find("no-node").hidden = count > 0 || !terms.length;
  filterPending();
}

function filterPending() {
  const terms = words();
  let shown = 0;
  const rows = showFirst(find("pending").children, (row) => {
    const matching = groups.get(row).filter((each) => matches(each, terms, textsOfPending)).length;
    shown += matching;
    return matching > 0;
  }, "more-pending", "row", "tessera why -A");
  find("pending-scroll").hidden = rows === 0;
  find("nothing-pending").hidden = rows > 0;
  find("nothing-pending").textContent = state.pending.length ? "No pending claim matches the search." : "No claim is pending.";
  const part = shown < state.pendingCount ? `${shown} of ` : "";
  find("pending-count").textContent = state.pendingCount ? `${part}${state.pendingCount}` : "";
}

function searchFor(text) {
  find("search").value = text;
  filter();
  find("search").focus();
}

// ---- pending claims

function drawPending() {
  const focused = document.activeElement?.dataset.key;
  const keys = (selector) => [...find("pending").querySelectorAll(selector)];
  const open = new Set(keys("details[open] > [data-key]").map((each) => each.dataset.key));
  const rows = grouped(state.pending).map((group) => {
    const row = pendingRow(group, searchFor);
    groups.set(row, group);
    return row;
  });
  find("pending").replaceChildren(...rows);
  for (const each of keys("details > [data-key]")) each.parentElement.open = open.has(each.dataset.key);
  if (focused) keys("[data-key]").find((each) => each.dataset.key === focused)?.focus();
  filterPending();
}

setInterval(() => {
  for (const cell of document.querySelectorAll("[data-created]")) cell.textContent = age(cell.dataset.created);
}, 10_000);

// ---- the detail panel

async function openDetail(name) {
  const panel = (opened = { name, devices: null, problem: "" });
  drawDetail();
  find("detail").showModal();
  try {
    panel.devices = await (await request(`/api/nodes/${encodeURIComponent(name)}/devices`)).json();
  } catch (error) {
    panel.problem = `the devices of other drivers can't be read: ${error.message}`;
  }
  if (opened === panel) drawDetail();
}

function drawDetail() {
  const node = state.nodes.get(opened.name);
  find("detail-title").textContent = printable(opened.name);
  const content = node ? nodeDetail(node, opened.devices, opened.problem) : [element("p", {}, "This node is gone.")];
  find("detail-content").replaceChildren(...content.filter((each) => each !== null));
}

find("detail-close").addEventListener("click", () => find("detail").close());
find("detail").addEventListener("close", () => (opened = null));

// ---- connection and token

function show(connection, message) {
  const text = connection === "live" ? `live, last change ${new Date().toLocaleTimeString()}` : `${printable(message)}; trying again`;
  find("connection").dataset.state = connection;
  find("connection").textContent = text;
  find("content").hidden = frames.size === 0 && connection !== "live";
  find("stale").hidden = state.stale === null;
  find("stale").textContent = state.stale === null ? "" : `This is the last known state: ${printable(state.stale)}`;
}

/** Resolves when a token has been entered. What was shown is removed: it is no longer this person's to see. */
function askForToken(problem) {
  state.nodes.clear();
  Object.assign(state, { classes: [], products: [], pending: [], pendingCount: 0, evictions: [], stale: null });
  version = "";
  if (find("detail").open) find("detail").close();
  drawNodes(null);
  drawPending();
  show("lost", "no access");
  find("connection").textContent = "no access";
  find("token-problem").textContent = printable(problem);
  find("token-form").hidden = false;
  find("token").focus();
  return new Promise((resolve) => {
    find("token-form").addEventListener("submit", (event) => {
      event.preventDefault();
      token = find("token").value.trim();
      find("token").value = "";
      find("token-form").hidden = true;
      resolve();
    }, { once: true });
  });
}

find("search").addEventListener("input", filter);
document.addEventListener("keydown", (event) => {
  const isTyping = event.target instanceof HTMLInputElement;
  if (event.key === "/" && !isTyping && !find("detail").open) {
    event.preventDefault();
    find("search").focus();
  } else if (event.key === "Escape" && event.target === find("search")) {
    searchFor("");
  }
});

follow();
