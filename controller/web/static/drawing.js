// Elements for the values of the page. Text that comes from the cluster becomes text nodes and attributes, never markup.

export const STATES = {
  cordoned: "cordoned", "not-ready": "not ready", paused: "plan paused", unreported: "has not reported its GPUs",
  incomplete: "slices incomplete: the scheduler skips it", standalone: "standalone", complete: "publishes every device",
};
const SLICE_STATES = ["held", "offered", "free", "stranded", "unavailable"];
const HUES = 10;
const SHOWN_HOLDERS = 3;

/** Text without control and invisible characters, among them those that reverse the direction of what follows. */
export function printable(text) {
  return String(text).replace(/[\p{C}]/gu, (found) => (found === "\n" ? " " : "\uFFFD"));
}

/** An element; `content` has texts and elements. */
export function element(tag, options = {}, ...content) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name === "class") made.className = value;
    else if (name === "click") made.addEventListener("click", value);
    else made.setAttribute(name, printable(value));
  }
  made.append(...content.filter((each) => each !== null).map((each) => (each instanceof Node ? each : printable(each))));
  return made;
}

export const counted = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
const className = (holder) => holder.deviceClass ?? "(class unknown)";
const holderName = (holder) => `${holder.namespace}/${holder.claim}`;
const shortNumber = (value) => String(Math.round(value * 100) / 100);

/** A letter for each class, as in `tessera map`: classes differ without colours, too. */
function mark(place) {
  return place < 26 ? String.fromCharCode(65 + place) : String(place);
}

function look(name, classes) {
  const place = classes.indexOf(name);
  return place < 0 ? { mark: "?", style: "held unknown-class" } : { mark: mark(place), style: `held class-${place % HUES}` };
}

export function legend(classes) {
  const key = (style, label, text) =>
    element("span", { class: "key" }, element("span", { class: `span ${style}`, "aria-hidden": "true" }, label), text);
  return [
    ...classes.map((name) => key(look(name, classes).style, look(name, classes).mark, name)),
    key("offered", "+", "offered"), key("free", "", "free"),
    key("stranded", "", "stranded: free, but too small or badly placed for what is requested"),
    key("unavailable", "", "unavailable"),
  ];
}

export function productRow(product) {
  const present = SLICE_STATES.filter((state) => product.slices[state] > 0);
  const text = present.map((state) => `${shortNumber(product.slices[state])} ${state}`).join(", ");
  const bar = element("div", { class: "totals", role: "img", "aria-label": text });
  for (const state of present) {
    const part = element("span", { class: `span ${state}`, title: `${shortNumber(product.slices[state])} ${state}` });
    part.style.flexGrow = product.slices[state];
    bar.append(part);
  }
  const largest = product.largestPartition;
  const fits = largest === null ? "-" : `${largest.profile} on ${counted(product.largestPartitionGpus, "GPU")}`;
  const number = (value) => element("td", { class: "number" }, value);
  return element("tr", { "data-product": product.product }, element("th", { scope: "row" }, product.product),
    ...[product.nodes, product.freeNodes, product.gpus, product.freeGpus, product.unhealthyGpus].map(number),
    element("td", {}, bar, element("span", { class: "dim" }, text)), element("td", {}, fits));
}

/** The empty frame of a node, which is cheap; `fillNode` draws its GPUs. */
export function nodeFrame(node, open) {
  const frame = element("article", { class: "node", "data-node": node.name },
    element("div", { class: "node-head" },
      element("h3", {}, element("button", { type: "button", "aria-haspopup": "dialog", click: () => open(node.name) }, node.name))),
    element("div", { class: "gpus" }));
  frame.style.setProperty("--gpus", node.gpus.length);
  return frame;
}

export function fillNode(frame, node, classes) {
  const head = frame.querySelector(".node-head");
  const products = [...new Set(node.gpus.map((gpu) => gpu.product))];
  head.replaceChildren(head.firstChild, element("span", { class: "dim" }, [...products, ...links(node.gpus)].join(" · ")),
    ...node.states.map(stateBadge));
  frame.querySelector(".gpus").replaceChildren(...node.gpus.flatMap((gpu) => [gpuRow(gpu, classes), ...notes(gpu)]),
    ...node.lostDevices.map((lost) => note(`${lost.device} is held by ${holderName(lost.holder)}, but the node reports no such GPU`)),
    ...(node.failedMonitors ?? []).map((holder) => note(`claim ${holderName(holder)}: ${holder.problem}`)));
  frame.style.setProperty("--gpus", node.gpus.length);
}

const stateBadge = (state) => element("span", { class: "state" }, STATES[state] ?? state);
const note = (text) => element("div", { class: "note" }, text);

function notes(gpu) {
  const texts = [];
  if (gpu.fault !== null) texts.push(gpu.fault);
  else if (gpu.cordon !== null) texts.push(`cordon requested: ${gpu.cordon}`);
  texts.push(...gpu.overlaps.map(([one, other]) => one === other ? `the claims of ${one} have more than its memory`
    : `${one} and ${other} are both held, but overlap`));
  const holders = new Map(gpu.spans.filter((span) => span.holder).map((span) => [holderName(span.holder), span.holder]));
  for (const [name, holder] of holders) {
    if (holder.problem !== null) texts.push(`claim ${name}: ${holder.problem}`);
  }
  return texts.map((text) => note(`gpu-${gpu.number}: ${text}`));
}

function gpuRow(gpu, classes) {
  const bar = element("div", { class: "bar", role: "img", "aria-label": `gpu-${gpu.number}: ${gpu.spans.map(describe).join("; ")}` });
  const cells = gpu.isDivided ? gpu.spans.length : gpu.memorySlices;
  bar.style.gridTemplateColumns = `repeat(${Math.max(1, cells)}, 1fr)`;
  gpu.spans.forEach((span, place) => {
    const made = drawSpan(span, classes);
    made.style.gridColumn = gpu.isDivided ? String(place + 1) : `${span.start + 1} / span ${span.size}`;
    made.style.gridRow = "1";
    bar.append(made);
  });
  return element("div", { class: "gpu", "data-gpu": gpu.number }, element("span", {}, `gpu-${gpu.number}`), bar);
}

function describe(span) {
  const memory = typeof span.memoryGib === "number" ? `${span.memoryGib} GiB ` : "";
  const kinds = memory + span.kinds.join(", ");
  if (span.state === "held") return `${kinds} held by ${span.holder ? `${holderName(span.holder)}, ${className(span.holder)}` : "?"}`;
  if (span.state === "offered") return `${kinds} offered`;
  return `${counted(span.size, "slice")} ${span.foreign ? "in a partition of others" : span.state}`;
}

function drawSpan(span, classes) {
  const title = span.devices.length ? `${describe(span)} (${span.devices.join(", ")})` : describe(span);
  const data = { title, "data-state": span.state };
  if (span.state !== "held") {
    const label = span.state === "offered" ? `+${span.kinds.join(" ")}` : span.foreign ? "foreign" : "";
    return element("span", { ...data, class: `span ${span.state}` }, label);
  }
  const style = span.holder ? look(className(span.holder), classes) : { mark: "?", style: "held unknown-class" };
  return element("span", { ...data, class: `span ${style.style}`, "data-claim": span.holder ? holderName(span.holder) : "" },
    span.holder ? `${style.mark} ${span.holder.claim}` : style.mark);
}

function links(gpus) {
  const cliques = new Map();
  for (const gpu of gpus) {
    if (gpu.nvlinkClique !== null) cliques.set(gpu.nvlinkClique, [...(cliques.get(gpu.nvlinkClique) ?? []), gpu.number]);
  }
  const joined = [...cliques.values()].filter((numbers) => numbers.length > 1).map(ranges);
  const fabrics = [...new Set(gpus.map((gpu) => gpu.fabricClique).filter((each) => each !== null))];
  return [...(joined.length ? [`NVLink ${joined.join(" ")}`] : []), ...(fabrics.length ? [`fabric ${fabrics.join(" ")}`] : [])];
}

/** `0-3,5` for 0, 1, 2, 3 and 5. */
function ranges(numbers) {
  const runs = [];
  for (const number of [...numbers].sort((a, b) => a - b)) {
    if (runs.length && runs.at(-1).at(-1) === number - 1) runs.at(-1).push(number);
    else runs.push([number]);
  }
  return runs.map((run) => (run.length > 1 ? `${run[0]}-${run.at(-1)}` : String(run[0]))).join(",");
}

/** The claims of one workload that wait for the same reason together, each other claim alone. */
export function grouped(pending) {
  const groups = new Map();
  for (const claim of pending) {
    const names = [claim.claim, ...claim.pods].filter(Boolean).map((name) => name.slice(name.indexOf("/") + 1));
    const message = names.reduce((text, name) => text.replaceAll(name, ""), claim.message);
    const key = claim.workload === null ? groups.size : JSON.stringify([claim.workload, claim.reason, message]);
    if (groups.has(key)) groups.get(key).push(claim);
    else groups.set(key, [claim]);
  }
  return [...groups.values()];
}

const podsOf = (each) => [...each.pods, ...(each.podCount > each.pods.length ? [`and ${each.podCount - each.pods.length} more`] : [])].join(", ");
const claimOf = (each) => each.claim ?? "(no claim yet)";
const waiting = (tag, each) => element(tag, { "data-created": each.created ?? "" }, age(each.created));

/** A row for a group; what would help is that of the first claim for which it was looked for. */
export function pendingRow(group, search) {
  const [first] = group;
  const each = group.find((claim) => claim.isExplained) ?? first;
  const holder = (name) => element("button",
    { type: "button", title: "search for it", "data-key": `${first.claim} ${name}`, click: () => search(name) }, name);
  const list = (items) => element("ul", {}, ...items.map((item) => element("li", {}, ...[item].flat())));
  const more = each.holderCount - each.holders.length;
  const help = each.isExplained
    ? (each.changes.length ? list(each.changes.map((change) => change.text)) : "-")
    : element("span", { class: "dim" }, "not determined here: run tessera why");
  const [claims, pods] = group.length === 1 ? [claimOf(first), podsOf(first)] : [
    element("details", {}, element("summary", { "data-key": `${first.workload} ${first.reason}` }, `${group.length} claims of ${first.workload}`),
      list(group.map((claim) => [`${claimOf(claim)}, pod ${podsOf(claim) || "-"}, `, waiting("span", claim)]))),
    counted(new Set(group.flatMap((claim) => claim.pods)).size, "pod"),
  ];
  return element("tr", { "data-claim": first.claim ?? first.pods[0] },
    element("td", {}, claims), element("td", {}, pods), waiting("td", first),
    element("td", {}, element("span", { class: "code" }, each.reason), `: ${each.message}`,
      each.reports.length ? element("details", {}, element("summary", {}, "the scheduler reports"), list(each.reports)) : null),
    element("td", {}, help),
    element("td", {}, ...holders(each.holders.map(holder), more)));
}

/** The first holders, and the others behind a switch: what would help names those that matter. */
function holders(buttons, more) {
  if (!buttons.length) return ["-"];
  const items = (list) => element("ul", { class: "plain" }, ...list.map((item) => element("li", {}, item)));
  if (buttons.length + more <= SHOWN_HOLDERS) return [items(buttons)];
  const rest = buttons.length + more - SHOWN_HOLDERS;
  return [items(buttons.slice(0, SHOWN_HOLDERS)), element("details", {}, element("summary", {}, `${rest} more`),
    items([...buttons.slice(SHOWN_HOLDERS), ...(more > 0 ? [`and ${more} more`] : [])]))];
}

/** Milliseconds that the API server's clock is ahead of this machine's. */
let ahead = 0;

export function setClock(date) {
  ahead = (Date.parse(date) || Date.now()) - Date.now();
}

export function age(created) {
  if (!created) return "";
  const seconds = Math.max(0, Math.floor((Date.now() + ahead - Date.parse(created)) / 1000));
  for (const [size, noun] of [[86400, "day"], [3600, "hour"], [60, "minute"]]) {
    if (seconds >= 2 * size) return counted(Math.floor(seconds / size), noun);
  }
  return counted(seconds, "second");
}

/** A pod that was evicted, as the controller records it; earlier versions do not record its name. */
export function evictionRow([uid, , node, at, policy, pod, trigger, contender, hours]) {
  const created = new Date(1000 * at).toISOString();
  const why = [trigger, policy].filter(Boolean).join(", policy ");
  return element("tr", {}, element("td", {}, pod || uid), element("td", { "data-created": created }, age(created)),
    ...[node, contender, shortNumber(hours), why].map((text) => element("td", {}, text || "-")));
}

/** The topology of a node: GPUs and the devices of other drivers by NUMA node and PCIe root. */
export function nodeDetail(node, devices, problem) {
  const roots = new Map();
  const at = (root) => {
    if (!roots.has(root)) roots.set(root, { gpus: [], others: [] });
    return roots.get(root);
  };
  node.gpus.forEach((gpu, place) => at(node.hardware[place]?.pcieRoot ?? "").gpus.push([gpu, node.hardware[place]]));
  for (const device of devices ?? []) at(device.pcieRoot).others.push(device);
  const parts = [...roots].sort(([one], [other]) => (one < other ? -1 : 1)).map(([root, { gpus, others }]) => {
    const numa = [...new Set(gpus.map(([, hardware]) => hardware?.numaNode).filter((each) => each !== null && each !== undefined))];
    const title = [root ? `PCIe root ${root}` : "PCIe root unknown", ...numa.map((each) => `NUMA node ${each}`)].join(", ");
    return element("div", { class: "root", "data-root": root }, element("h3", {}, title),
      element("ul", {}, ...gpus.map(([gpu, hardware]) => gpuDetail(gpu, hardware)),
        ...others.map((other) => element("li", { "data-device": other.device },
          `${other.device} of ${other.driver}${other.pciBusId ? ` at ${other.pciBusId}` : ""}`))));
  });
  const joined = links(node.gpus).join(" · ");
  const others = problem ? note(problem) : devices === null ? element("p", { class: "dim" }, "Reading the devices of other drivers.")
    : devices.length ? null : element("p", { class: "dim" }, "No other driver publishes a device with a PCIe root here, such as a NIC.");
  return [element("p", {}, ...node.states.map(stateBadge), joined || "No GPUs joined by NVLink."), ...parts, others];
}

function gpuDetail(gpu, hardware) {
  const facts = [`${gpu.product}, ${(gpu.memoryBytes / 2 ** 30).toFixed(0)} GiB, ${gpu.uuid}`, `MIG ${gpu.migMode}`];
  if (hardware) {
    facts.push(`at ${hardware.pciBusId}`, `driver ${hardware.driverVersion}`);
    if (hardware.nvlinkLinks) {
      const speed = `generation ${hardware.nvlinkGeneration ?? "?"}, ${hardware.nvlinkBandwidth ?? "?"} GB/s`;
      facts.push(`${counted(hardware.nvlinkLinks, "NVLink")} (${speed})`);
    }
  }
  if (gpu.nvlinkClique !== null) facts.push(`clique ${gpu.nvlinkClique}`);
  if (gpu.fabricClique !== null) facts.push(`fabric clique ${gpu.fabricClique}`);
  return element("li", { "data-gpu": gpu.number }, element("strong", {}, `gpu-${gpu.number}`), ` ${facts.join(" · ")}`, ...notes(gpu));
}
