"use strict";
// The dashboard. Data of the store is inserted as text (`escapeText`), never as HTML.

const STATUS_MS = 1000, HISTORY_MS = 10000, FLEET_MS = 15000, RESPONSE_MS = 6000;
const RETRY_MS = 2000;
const HOUR_MS = 3600e3, SPAN_MIN_MS = 300e3, EVENTS_MAX = 1000;
const FOLD_MS = 60e3, FOLD_MAX = 200;
const VIEWS = ["overview", "nodes", "prefixes", "namespaces", "misses", "events"];
const $ = (id) => document.getElementById(id);

// --- text ----------------------------------------------------------------------------------------

/** Escapes invisible characters, and those that change the order of the text. */
function escapeText(text) {
  return String(text).replace(/\\|[\p{C}\p{Zl}\p{Zp}]|(?! )\p{Zs}|\p{Default_Ignorable_Code_Point}/gu,
    (sign) => sign === "\\" ? "\\\\" : `\\u{${sign.codePointAt(0).toString(16)}}`);
}

function bytes(number) {
  if (number == null) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (number >= (unit ? 999.5 : 1024) && unit < units.length - 1) { number /= 1024; unit++; }
  return `${unit ? number.toPrecision(3) : Math.round(number)} ${units[unit]}`;
}

function count(number) {
  if (number == null) return "–";
  if (number >= 1e6) return `${(number / 1e6).toPrecision(3)} M`;
  return number >= 100 ? Math.round(number).toLocaleString("en") : String(+number.toPrecision(2));
}

function time(seconds) {
  if (seconds == null) return "–";
  if (!seconds) return "0 s";
  if (seconds < 1e-3) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 1) return `${+(seconds * 1e3).toPrecision(3)} ms`;
  if (seconds < 60) return `${+seconds.toPrecision(3)} s`;
  const [divisor, large, part, small] = seconds < 3600 ? [60, "min", 1, "s"]
    : seconds < 86400 ? [3600, "h", 60, "min"] : [86400, "d", 3600, "h"];
  const rest = Math.floor(seconds % divisor / part);
  return `${Math.floor(seconds / divisor)} ${large}${rest ? ` ${rest} ${small}` : ""}`;
}

const percent = (share) => share == null ? "–" : `${+(share * 100).toFixed(share > 0.995 ? 2 : 1)} %`;
const clock = (ms) => new Date(ms).toLocaleTimeString("en-GB");
const day = (ms) => new Date(ms).toLocaleString("sv-SE");
const sum = (list) => list.reduce((one, other) => one + other, 0);

// --- elements ------------------------------------------------------------------------------------

function element(tag, kind = "", ...children) {
  const made = document.createElement(tag);
  if (kind) made.className = kind;
  made.append(...children);
  return made;
}

function svgElement(tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Keeps one child of `parent` for each item, created by `make` and updated by `fill`. */
function updateChildren(parent, items, make, fill) {
  while (parent.children.length > items.length) parent.lastElementChild.remove();
  items.forEach((item, index) => {
    if (index === parent.children.length) parent.append(make(item));
    fill(parent.children[index], item);
  });
}

function headCell(text) {
  const cell = element("th", "", text);
  cell.scope = "col";
  return cell;
}

/** Wraps a table so that it can be scrolled, also with the keyboard. */
function scrollable(name, made) {
  const place = element("div", "wide", made);
  for (const [attribute, value] of Object.entries({ tabindex: 0, role: "region", "aria-label": name })) place.setAttribute(attribute, value);
  return place;
}

/** Rows of cells: [text, class]. On a phone a row of many cells is a list, with the head of each. */
function table(body, rows) {
  const heads = [...body.parentElement.tHead.rows[0].cells].map((cell) => cell.textContent);
  body.parentElement.classList.toggle("stacks", heads.length > 3);
  updateChildren(body, rows, () => element("tr"), (row, cells) =>
    updateChildren(row, cells, () => element("td"), (cell, [text, kind]) => {
      put(cell, text);
      cell.className = kind || "";
      cell.dataset.head = heads[cell.cellIndex];
    }));
}

// --- overview ------------------------------------------------------------------------------------

const charts = CHARTS.map((described) => new Chart(described));

function showTiles(status, history) {
  const minute = (name) => {
    const values = (history ? history[name] : []).slice(-6);
    return values.length ? sum(values) / values.length : null;
  };
  const last = (name) => history ? history[name].findLast((value) => value != null) : null;
  const total = (name) => history ? sum(history[name]) : 0;
  const used = sum(status.nodes.map((node) => node.used)), size = sum(status.nodes.map((node) => node.size));
  const objects = sum(status.namespaces.map((row) => row.objects)) + status.other_namespaces.objects;
  const spaces = status.namespaces.length + status.other_namespaces.namespaces;
  updateChildren($("tiles"), [
    ["Hit ratio", percent(ratio(minute("matched_per_s"), minute("missed_per_s"))), `${percent(ratio(total("matched_per_s"), total("missed_per_s")))} in the last hour`],
    ["Memory", size ? percent(used / size) : "–", `${bytes(used)} of ${bytes(size)}`],
    ["Objects", count(objects), `in ${spaces} namespace${spaces === 1 ? "" : "s"}`],
    ["Nodes", String(status.nodes.length), `${status.nodes.filter((node) => node.state === "alive").length} alive`],
    ["Calls", `${count(minute("calls_per_s"))}/s`, `p50 ${time(last("call_p50_s"))}, p99 ${time(last("call_p99_s"))}`],
    ["Puts", `${count(minute("stored_per_s"))}/s`, `${bytes(minute("stored_bytes_per_s"))}/s`],
    ["Evictions", `${count(minute("evicted_per_s"))}/s`, `half idle for ${time(last("eviction_age_s"))}`],
  ], () => element("div", "tile", element("span"), element("b"), element("span")), (tile, texts) =>
    texts.forEach((text, index) => put(tile.children[index], text)));
}

function showCalls(calls) {
  const rows = calls.map((row) => [[row.call, "name"], [`${count(row.per_s)}/s`, "number"], [time(row.p50_s), "number"], [time(row.p99_s), "number"]]);
  table($("call-rows"), rows.length ? rows : [[["no calls yet"], [""], [""], [""]]]);
}

/** A standby shows only its own problems. */
function showProblems(problems, leads) {
  const list = problems.length || !leads ? problems : [{ level: "well", text: "No problems detected.", runbook: "" }];
  updateChildren($("problems"), list, () => element("li", "", element("span"), " ", element("a", "", "What to do")), (item, problem) => {
    item.className = ["bad", "warning", "note", "well"].includes(problem.level) ? problem.level : "note";
    const [text, link] = item.children;
    put(text, escapeText(problem.text));
    link.hidden = !problem.runbook;
    link.href = `runbook#${problem.runbook.toLowerCase()}`;
  });
}

// --- nodes ---------------------------------------------------------------------------------------

const PARTS = ["stored", "pending", "quarantined", "reclaim"];

function nodeCard() {
  return element("article", "node",
    element("div", "top", element("h3"), element("span", "state"), element("span", "quiet")),
    element("div", "bar", ...PARTS.map((part) => element("i", part))),
    element("p", "quiet"));
}

function showNode(card, node) {
  const total = (name) => sum(node.segments.map((segment) => segment[name]));
  const size = node.size;
  const parts = { pending: total("pending"), quarantined: total("quarantined"), reclaim: total("reclaim") };
  parts.stored = Math.max(0, node.used - sum(Object.values(parts)));
  const [top, bar, text] = card.children;
  put(top.children[0], escapeText(node.name));
  put(top.children[1], node.state);
  top.children[1].className = `state ${node.state}`;
  put(top.children[2], `${escapeText(node.address || `no data port, host ${node.host}`)} · ${node.transports.join(", ")} · last heartbeat ${time(node.silent_ms / 1000)} ago${node.version ? ` · version ${escapeText(node.version)}` : ""}`);
  PARTS.forEach((part, index) => { bar.children[index].style.width = `${size ? 100 * parts[part] / size : 0}%`; });
  const free = size - node.used;
  put(text, [
    `${bytes(node.used)} of ${bytes(size)} used`,
    ...PARTS.slice(1).filter((part) => parts[part]).map((part) => `${bytes(parts[part])} ${{ pending: "being written", quarantined: "quarantined", reclaim: "awaiting reclaim" }[part]}`),
    `${bytes(free)} free, largest free extent ${bytes(node.largest_free)}`,
    ...(node.segments.length > 1 ? [`${node.segments.length} segments`] : []),
  ].join(" · "));
}

const MOVED = ["stored_bytes", "written_bytes", "read_bytes"], MOVED_MS = 10000;
let samples = [];  // of the last ten seconds, the oldest first

function addSample(nodes) {
  const now = performance.now();
  samples = [...samples.filter((sample) => now - sample.at < MOVED_MS), { at: now, of: new Map(nodes.map((node) => [node.name, node])) }];
}

/** Bytes transferred by each node; no rate for a node that has joined or restarted since. */
function showMoved(nodes) {
  const first = samples[0], seconds = (samples.at(-1).at - first.at) / 1000;
  $("moved").hidden = !nodes.length;
  table($("moved-rows"), nodes.map((node) => [[escapeText(node.name), "name"], ...MOVED.map((what) => {
    const rate = (node[what] - first.of.get(node.name)?.[what]) / seconds;
    return [`${bytes(node[what])}${rate > 0 ? ` (${bytes(rate)}/s)` : ""}`, "number"];
  })]));
}

// --- namespaces ----------------------------------------------------------------------------------

let modelOf = new Map();

/** The tenants and their quotas; highlights memory near its limit. */
function showTenants(tenants) {
  const number = (text, kind = "") => [text, `number ${kind}`];
  const of = (used, bound) => bound ? `${bytes(used)} of ${bytes(bound)}` : bytes(used);
  $("tenants").hidden = !tenants.length;
  table($("tenant-rows"), tenants.map((row) => [
    [escapeText(row.name) || "all others", "name"], [row.namespaces.map(escapeText).join("\n"), "name"],
    number(bytes(row.bytes), row.limit_bytes && row.bytes > 0.95 * row.limit_bytes ? "warning" : ""),
    number(row.guarantee_bytes ? bytes(row.guarantee_bytes) : ""), number(row.limit_bytes ? bytes(row.limit_bytes) : ""),
    number(of(row.disk_bytes, row.disk_limit_bytes)), number(of(row.pinned, row.pinned_max)), number(row.objects.toLocaleString("en")),
    number(row.evicted_by_own.toLocaleString("en")), number(row.evicted_by_others.toLocaleString("en")), number(row.refused.toLocaleString("en")),
  ]));
}

function showNamespaces(status) {
  showTenants(status.tenants);
  const cells = (name, model, row) => [
    [name, "name"], [model], [row.objects.toLocaleString("en"), "number"], [bytes(row.size), "number"],
    [row.pinned_objects ? `${row.pinned_objects.toLocaleString("en")} (${bytes(row.pinned_bytes)})` : "", "number"],
  ];
  const rows = status.namespaces.map((row) => cells(escapeText(row.name), modelOf.get(row.name) || "", row));
  const others = status.other_namespaces;
  if (others.namespaces) rows.push(cells(`${others.namespaces.toLocaleString("en")} smaller namespaces`, "", others));
  table($("namespace-rows"), rows.length ? rows : [[["no objects stored"], [""], [""], [""], [""]]]);
}

function showFleet(models) {
  modelOf = new Map();
  for (const model of models) for (const record of model.records) for (const name of record.namespaces)
    modelOf.set(name, `${escapeText(model.engine)}, ${escapeText(model.model)}`);
  const parent = $("fleet");
  if (!models.length) { put(parent, "No fleet records."); return; }
  parent.replaceChildren(...models.map((model) => {
    const one = model.records.length === 1;
    const why = one ? "one fingerprint: all of its engines share their blocks"
      : `${model.records.length} fingerprints, which share no blocks; they differ in ${model.differing.map(escapeText).join(", ") || "the layout of the cache only"}`;
    const head = element("tr", "", ...["fingerprint", ...model.differing.map(escapeText), "namespaces"].map(headCell));
    const body = element("tbody"), made = element("table", "", element("thead", "", head), body);
    table(body, model.records.map((record) => [
      [escapeText(record.fingerprint), "name"], ...record.differing.map((text) => [escapeText(text), "name"]),
      [record.namespaces.map(escapeText).join("\n"), "name"],
    ]));
    return element("div", "model", element("h3", "", `${escapeText(model.engine)}: ${escapeText(model.model)}`), element("p", "quiet", why),
      scrollable(`Fingerprints of ${escapeText(model.model)}`, made));
  }));
}

// --- events --------------------------------------------------------------------------------------

const CLUSTER_EVENT_TEXTS = {
  leads: (f) => `This master leads, epoch ${f.epoch}`,
  stands_by: (f) => `This master is a standby; leader: ${f.leader}`,
  node_joined: (f) => `Node ${f.node} joined with ${bytes(f.bytes)}`,
  node_resumed: (f) => `Node ${f.node} resumed its stream`,
  node_stream_broken: (f) => `Node ${f.node} is suspect: its stream broke`,
  node_dead: (f) => `Node ${f.node} is dead (${f.why}): ${bytes(f.bytes)} of memory lost`,
  node_left: (f) => `Node ${f.node} left`,
  node_draining: (f) => `Node ${f.node} is draining: it gets no new objects`,
  node_undrained: (f) => `Node ${f.node} gets new objects again`,
  node_unreachable: (f) => `The master cannot connect to node ${f.node}: ${f.reason}`,
  node_reachable: (f) => `The master can connect to node ${f.node} again`,
  node_shm_entry_missing: (f) => `Node ${f.node} has lost its entry in /dev/shm: new clients use tcp`,
  node_reported: (f) => `Node ${f.node} was reported as unreachable by ${f.by_client}`,
  corrupt_object: (f) => `Corrupt object ${f.key} of namespace ${f.namespace}, on ${f.nodes}`,
  disk_failed: (f) => `A disk of node ${f.node} failed: it is not used any more`,
  disk_copy_corrupt: (f) => `Corrupt copy of object ${f.key} of namespace ${f.namespace}, on a disk of ${f.node}`,
  inventory_done: (f) => `Node ${f.node} reported its inventory: ${amount(f.claimed, "object")} accepted${f.refused ? `, ${amount(f.refused, "object")} rejected` : ""}`,
  removal_watermark_found: (f) => `Node ${f.node} has the removal watermark of epoch ${f.epoch}: memory with an older one is discarded`,
  puts_expired: (f) => `${amount(f.puts, "put")} of ${bytes(f.bytes)} expired; the memory is in quarantine`,
  replicas_missing: (f) => `${amount(f.objects, "object")} with fewer replicas than requested; ${f.repaired.toLocaleString("en")} repaired`,
  tenants_changed: (f) => `The tenants file has changed: ${amount(f.tenants, "tenant")}, ${bytes(f.guarantee)} guaranteed in total`,
  guarantees_exceed_pool: (f) => `Guarantees of tenants (${bytes(f.guarantee)}) exceed the memory of the store (${bytes(f.pool)})`,
  epoch_rejected: (f) => `Node ${f.node} reported epoch ${f.epoch}, which was rejected as implausible`,
};
const BAD_EVENTS = ["node_dead", "node_stream_broken", "node_unreachable", "node_shm_entry_missing", "corrupt_object", "disk_failed"];
const WARNING_EVENTS = ["node_reported", "disk_copy_corrupt", "puts_expired", "replicas_missing", "guarantees_exceed_pool", "epoch_rejected"];

const amount = (number, one) => `${number.toLocaleString("en")} ${one}${number === 1 ? "" : "s"}`;

/** Adds a sentence, which opens to the event as in the master's log. Events of one kind within a minute share a row. */
function addEvent(at, event, fields) {
  const raw = escapeText([event, ...Object.entries(fields).map(([name, value]) => `${name}=${value}`)].join(" "));
  const known = Object.hasOwn(CLUSTER_EVENT_TEXTS, event);
  const last = $("event-rows").firstElementChild?.querySelector("details");
  if (last?.dataset.event === event && at - last.dataset.at < FOLD_MS && last.children.length < FOLD_MAX) {
    last.append(element("code", "", `${day(at)} ${raw}`));
    put(last.querySelector("span"), ` And ${last.children.length - 2} more.`);
    return;
  }
  const kind = BAD_EVENTS.includes(event) ? "bad" : WARNING_EVENTS.includes(event) ? "warning" : "";
  const sentence = known ? `${escapeText(CLUSTER_EVENT_TEXTS[event](fields))}.` : raw;
  const details = element("details", "", element("summary", "", sentence, element("span")), element("code", "", raw));
  Object.assign(details.dataset, { event, at });
  $("event-rows").prepend(element("tr", kind, element("td", "", day(at)), element("td", "", known ? details : sentence)));
}

const state = { run: null, last: 0 };

function showEvents(response) {
  if (response.run !== state.run) {
    $("event-rows").replaceChildren();
    const isRestart = state.last > 0;
    Object.assign(state, { run: response.run, last: 0 });
    if (isRestart) return;  // its numbers begin at 1
  }
  for (const [, at, event, fields] of response.events) addEvent(at, event, fields);
  state.last = response.last;
  while ($("event-rows").children.length > EVENTS_MAX) $("event-rows").lastElementChild.remove();
  $("no-events").hidden = $("event-rows").children.length > 0;
}

// --- requests -------------------------------------------------------------------------------------

/** Kept by this tab until it is closed; never part of a URL. */
const TOKEN = "kvstore-token";

/** GET, or POST of `body` as JSON. */
async function request(path, body = null, timeoutMs = RESPONSE_MS) {
  const token = sessionStorage.getItem(TOKEN), headers = token ? { Authorization: `Bearer ${token}` } : {};
  const posted = body ? { method: "POST", body: JSON.stringify(body) } : {};
  if (body) headers["Content-Type"] = "application/json";
  const response = await fetch(path, { cache: "no-store", headers, signal: AbortSignal.timeout(timeoutMs), ...posted });
  const locked = response.headers.get("WWW-Authenticate")?.startsWith("Bearer"), refused = response.status < 500;
  if (!response.ok) throw Object.assign(new Error((await response.text()).trim() || `status ${response.status}`), { locked, refused });
  return response.json();
}

let view = "overview", status = null, history = null, receivedAt = null;

function show() {
  if (!status) return;
  const leads = status.leads;
  const bad = status.problems.filter((problem) => problem.level === "bad").length;
  document.title = `${bad ? `(${bad}) ` : ""}kvstore ${escapeText(status.cluster)}`;
  put($("cluster"), escapeText(status.cluster));
  put($("role"), `${leads ? "leader" : "standby"} · epoch ${status.epoch} · version ${escapeText(status.version)}`
    + (leads ? ` · up ${time(Math.floor(status.uptime_ms / 1000))}` : ""));
  showProblems(status.problems, leads);
  document.querySelector("#view-nodes .legend").hidden = leads && !status.nodes.length;
  $("standby").hidden = leads;
  $("tiles").hidden = $("measured").hidden = !leads;
  if (!leads) {
    const link = element("a", "", escapeText(status.leader));
    if (/^https?:\/\//.test(status.leader_page)) link.href = status.leader_page;
    $("standby").replaceChildren("This master is a standby. ", ...(status.leader ? ["Leader: ", link] : ["No leader known."]));
    table($("namespace-rows"), []);
    $("node-cards").replaceChildren();
    $("moved").hidden = true;
    return;
  }
  if (view === "overview") showTiles(status, history);
  if (view === "nodes") {
    const nodes = [...status.nodes].sort((one, other) => (one.state === "alive") - (other.state === "alive"));
    updateChildren($("node-cards"), nodes, nodeCard, showNode);
    showMoved(nodes);
  }
  if (view === "namespaces") showNamespaces(status);
  if (view === "prefixes") showSpaces($("chains-of"), []);
  if (view === "misses") showMisses();
}

// The first one detects an unavailable master.
const POLLS = [
  { every: STATUS_MS, isNeeded: () => true, run: async () => { status = await request("api/v1/status"); receivedAt = Date.now(); addSample(status.nodes || []); show(); } },
  { every: HISTORY_MS, isNeeded: () => view === "overview", run: async () => {
    history = await request("api/v1/history");
    charts.forEach((chart) => chart.draw(history));
    showCalls(history.calls);
  } },
  { every: STATUS_MS, isNeeded: () => view === "events", run: async () => {
    showEvents(await request(`api/v1/cluster-events?after=${state.last}`));
  } },
  { every: FLEET_MS, isNeeded: () => ["prefixes", "namespaces", "misses"].includes(view) && status?.leads !== false, run: async () => {
    showFleet((await request("api/v1/fleet")).models);
    show();
  } },
];

function showUnavailable(error) {
  $("token").hidden = !error.locked;
  $("lost").hidden = Boolean(error.locked);
  if (error.locked) return;
  const since = receivedAt ? ` Last update: ${clock(receivedAt)}.` : "";
  put($("lost"), error.refused ? escapeText(error.message) : `The master does not respond (${escapeText(error.message)}).${since}`);
}

/** Runs a query repeatedly, while the page is visible and the view needs it. */
async function poll(query) {
  clearTimeout(query.timer);
  if (query.running) return;
  let pause = query.every;
  if (!document.hidden && query.isNeeded()) {
    query.running = true;
    try {
      await query.run();
      if (query === POLLS[0]) $("lost").hidden = $("token").hidden = true;
    } catch (error) {
      pause = Math.min(pause, RETRY_MS);
      if (query === POLLS[0]) showUnavailable(error);
    } finally {
      query.running = false;
    }
  }
  query.timer = setTimeout(poll, pause, query);
}

function choose() {
  const wanted = location.hash.slice(1);
  view = VIEWS.includes(wanted) ? wanted : "overview";
  for (const name of VIEWS) $(`view-${name}`).hidden = name !== view;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${view}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  show();
  POLLS.forEach(poll);
}

$("charts").append(...charts.map((chart) => chart.element));
addEventListener("hashchange", choose);
$("token").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(TOKEN, $("token-text").value);
  $("token-text").value = "";
  POLLS.forEach(poll);
});
document.addEventListener("visibilitychange", () => POLLS.forEach(poll));
choose();
