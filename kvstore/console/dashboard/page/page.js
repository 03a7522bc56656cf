"use strict";
// The dashboard. Everything that comes from the store goes to the page as text (`shown`), never as HTML.

const STATUS_MS = 1000, HISTORY_MS = 10000, FLEET_MS = 15000, ANSWER_MS = 6000;
const AGAIN_MS = 2000;  // after a question that failed
const HOUR_MS = 3600e3, SPAN_MIN_MS = 300e3, EVENTS_MAX = 1000;
const VIEWS = ["overview", "nodes", "prefixes", "namespaces", "misses", "events"];
const $ = (id) => document.getElementById(id);

// --- text ----------------------------------------------------------------------------------------

/** A name with all that is invisible, or that changes the order of what follows, escaped. */
function shown(text) {
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
  const [each, large, part, small] = seconds < 3600 ? [60, "min", 1, "s"]
    : seconds < 86400 ? [3600, "h", 60, "min"] : [86400, "d", 3600, "h"];
  const rest = Math.floor(seconds % each / part);
  return `${Math.floor(seconds / each)} ${large}${rest ? ` ${rest} ${small}` : ""}`;
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

function drawn(tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Makes the children of `parent` as many as `wanted`, one for each, and lets `fill` update them. */
function each(parent, wanted, make, fill) {
  while (parent.children.length > wanted.length) parent.lastElementChild.remove();
  wanted.forEach((what, index) => {
    if (index === parent.children.length) parent.append(make(what));
    fill(parent.children[index], what);
  });
}

function headCell(text) {
  const cell = element("th", "", text);
  cell.scope = "col";
  return cell;
}

/** A table that may be wider than the page, and is then scrolled, also with the keyboard. */
function wide(name, made) {
  const place = element("div", "wide", made);
  for (const [attribute, value] of Object.entries({ tabindex: 0, role: "region", "aria-label": name })) place.setAttribute(attribute, value);
  return place;
}

/** Rows of cells: [text, class]. */
function table(body, rows) {
  each(body, rows, () => element("tr"), (row, cells) =>
    each(row, cells, () => element("td"), (cell, [text, kind]) => {
      put(cell, text);
      cell.className = kind || "";
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
  const whole = (name) => history ? sum(history[name]) : 0;
  const used = sum(status.nodes.map((node) => node.used)), size = sum(status.nodes.map((node) => node.size));
  const objects = sum(status.namespaces.map((row) => row.objects)) + status.other_namespaces.objects;
  const spaces = status.namespaces.length + status.other_namespaces.namespaces;
  each($("tiles"), [
    ["Hit ratio", percent(ratio(minute("matched_per_s"), minute("missed_per_s"))), `${percent(ratio(whole("matched_per_s"), whole("missed_per_s")))} in the last hour`],
    ["Memory", size ? percent(used / size) : "–", `${bytes(used)} of ${bytes(size)}`],
    ["Objects", count(objects), `in ${spaces} namespace${spaces === 1 ? "" : "s"}`],
    ["Nodes", String(status.nodes.length), `${status.nodes.filter((node) => node.state === "alive").length} alive`],
    ["Calls", `${count(minute("calls_per_s"))}/s`, `p50 ${time(last("call_p50_s"))}, p99 ${time(last("call_p99_s"))}`],
    ["Puts", `${count(minute("stored_per_s"))}/s`, `${bytes(minute("stored_bytes_per_s"))}/s`],
    ["Evictions", `${count(minute("evicted_per_s"))}/s`, `half unused for ${time(last("eviction_age_s"))}`],
  ], () => element("div", "tile", element("span"), element("b"), element("span")), (tile, texts) =>
    texts.forEach((text, index) => put(tile.children[index], text)));
}

/** Each kind of call of the last ten minutes. */
function showCalls(calls) {
  const rows = calls.map((row) => [[row.call, "name"], [`${count(row.per_s)}/s`, "number"], [time(row.p50_s), "number"], [time(row.p99_s), "number"]]);
  table($("call-rows"), rows.length ? rows : [[["no call yet"], [""], [""], [""]]]);
}

/** A master that stands by gives no verdict on the store: the one that leads does. */
function showProblems(problems, leads) {
  const list = problems.length || !leads ? problems : [{ level: "well", text: "Nothing is wrong.", runbook: "" }];
  each($("problems"), list, () => element("li", "", element("span"), " ", element("a", "", "What to do")), (item, problem) => {
    item.className = ["bad", "warning", "note", "well"].includes(problem.level) ? problem.level : "note";
    const [text, link] = item.children;
    put(text, shown(problem.text));
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
  put(top.children[0], shown(node.name));
  put(top.children[1], node.state);
  top.children[1].className = `state ${node.state}`;
  put(top.children[2], `${shown(node.address || `no data port, host ${node.host}`)} · ${node.transports.join(", ")} · heard ${time(node.silent_ms / 1000)} ago${node.version ? ` · version ${shown(node.version)}` : ""}`);
  PARTS.forEach((part, index) => { bar.children[index].style.width = `${size ? 100 * parts[part] / size : 0}%`; });
  const free = size - node.used;
  put(text, [
    `${bytes(node.used)} of ${bytes(size)} used`,
    ...PARTS.slice(1).filter((part) => parts[part]).map((part) => `${bytes(parts[part])} ${{ pending: "being written", quarantined: "quarantined", reclaim: "awaiting reclaim" }[part]}`),
    `${bytes(free)} free, the largest piece ${bytes(node.largest_free)}`,
    ...(node.segments.length > 1 ? [`${node.segments.length} segments`] : []),
  ].join(" · "));
}

const MOVED = ["stored_bytes", "written_bytes", "read_bytes"], MOVED_MS = 10000;
let looks = [];  // at the nodes, of the last ten seconds, the oldest first

function noteMoved(nodes) {
  const now = performance.now();
  looks = [...looks.filter((look) => now - look.at < MOVED_MS), { at: now, of: new Map(nodes.map((node) => [node.name, node])) }];
}

/** What was moved to and from each node; no rate for a node that has come since, or has begun to count anew. */
function showMoved(nodes) {
  const first = looks[0], seconds = (looks.at(-1).at - first.at) / 1000;
  $("moved").hidden = !nodes.length;
  table($("moved-rows"), nodes.map((node) => [[shown(node.name), "name"], ...MOVED.map((what) => {
    const rate = (node[what] - first.of.get(node.name)?.[what]) / seconds;
    return [`${bytes(node[what])}${rate > 0 ? ` (${bytes(rate)}/s)` : ""}`, "number"];
  })]));
}

// --- namespaces ----------------------------------------------------------------------------------

let modelOf = new Map();

/** The tenants and their quotas; a bound that is nearly reached is marked. */
function showTenants(tenants) {
  const number = (text, kind = "") => [text, `number ${kind}`];
  const of = (used, bound) => bound ? `${bytes(used)} of ${bytes(bound)}` : bytes(used);
  $("tenants").hidden = !tenants.length;
  table($("tenant-rows"), tenants.map((row) => [
    [shown(row.name) || "all others", "name"], [row.namespaces.map(shown).join("\n"), "name"],
    number(bytes(row.bytes), row.limit_bytes && row.bytes > 0.95 * row.limit_bytes ? "warning" : ""),
    number(row.guarantee_bytes ? bytes(row.guarantee_bytes) : ""), number(row.limit_bytes ? bytes(row.limit_bytes) : ""),
    number(of(row.pinned, row.pinned_max)), number(row.objects.toLocaleString("en")),
    number(row.evicted_by_own.toLocaleString("en")), number(row.evicted_by_others.toLocaleString("en")), number(row.refused.toLocaleString("en")),
  ]));
}

function showNamespaces(status) {
  showTenants(status.tenants);
  const cells = (name, model, row) => [
    [name, "name"], [model], [row.objects.toLocaleString("en"), "number"], [bytes(row.size), "number"],
    [row.pinned_objects ? `${row.pinned_objects.toLocaleString("en")} (${bytes(row.pinned_bytes)})` : "", "number"],
  ];
  const rows = status.namespaces.map((row) => cells(shown(row.name), modelOf.get(row.name) || "", row));
  const others = status.other_namespaces;
  if (others.namespaces) rows.push(cells(`and ${others.namespaces.toLocaleString("en")} smaller ones`, "", others));
  table($("namespace-rows"), rows.length ? rows : [[["no namespace holds an object"], [""], [""], [""], [""]]]);
}

function showFleet(models) {
  modelOf = new Map();
  for (const model of models) for (const record of model.records) for (const name of record.namespaces)
    modelOf.set(name, `${shown(model.engine)}, ${shown(model.model)}`);
  const parent = $("fleet");
  if (!models.length) { put(parent, "No engine has announced itself."); return; }
  parent.replaceChildren(...models.map((model) => {
    const one = model.records.length === 1;
    const why = one ? "one fingerprint: all of its engines share their blocks"
      : `${model.records.length} fingerprints, which share no block; they differ in ${model.differing.map(shown).join(", ") || "the layout of the cache only"}`;
    const head = element("tr", "", ...["fingerprint", ...model.differing.map(shown), "namespaces"].map(headCell));
    const body = element("tbody");
    table(body, model.records.map((record) => [
      [shown(record.fingerprint), "name"], ...record.differing.map((text) => [shown(text), "name"]),
      [record.namespaces.map(shown).join("\n"), "name"],
    ]));
    return element("div", "model", element("h3", "", `${shown(model.engine)}: ${shown(model.model)}`), element("p", "quiet", why),
      wide(`Fingerprints of ${shown(model.model)}`, element("table", "", element("thead", "", head), body)));
  }));
}

// --- events --------------------------------------------------------------------------------------

const WORDS = {
  leads: (f) => `This master leads, epoch ${f.epoch}`,
  stands_by: (f) => `This master stands by; leader: ${f.leader}`,
  node_joined: (f) => `Node ${f.node} joined with ${bytes(f.bytes)}`,
  node_resumed: (f) => `Node ${f.node} resumed its stream`,
  node_stream_broken: (f) => `Node ${f.node} is suspect: its stream broke`,
  node_dead: (f) => `Node ${f.node} is dead (${f.why}): ${bytes(f.bytes)} of memory gone`,
  node_left: (f) => `Node ${f.node} left`,
  node_draining: (f) => `Node ${f.node} is drained: no new object goes there`,
  node_undrained: (f) => `Node ${f.node} gets new objects again`,
  node_unreachable: (f) => `The master cannot connect to node ${f.node}: ${f.reason}`,
  node_reachable: (f) => `The master can connect to node ${f.node} again`,
  node_shm_entry_missing: (f) => `The entry of node ${f.node} in /dev/shm is gone: new clients use tcp`,
  node_reported: (f) => `Node ${f.node} was reported as failing by ${f.by_client}`,
  corrupt_object: (f) => `Corrupt object ${f.key} of namespace ${f.namespace}, on ${f.nodes}`,
  inventory_done: (f) => `Node ${f.node} has told which objects it holds: ${amount(f.claimed, "object")} it has${f.refused ? `, ${amount(f.refused, "object")} it may not keep` : ""}`,
  removal_watermark_found: (f) => `Node ${f.node} was there when master ${f.epoch} removed objects: memory that was away is emptied`,
  puts_expired: (f) => `${amount(f.puts, "put")} of ${bytes(f.bytes)} did not end before the deadline; the memory is in quarantine`,
  replicas_missing: (f) => `${amount(f.objects, "object")} with fewer replicas than were asked for; ${f.repaired.toLocaleString("en")} copied`,
  tenants_changed: (f) => `The file of tenants has changed: ${amount(f.tenants, "tenant")}, ${bytes(f.guarantee)} guaranteed in all`,
  guarantees_exceed_pool: (f) => `Tenants are guaranteed ${bytes(f.guarantee)}, and the store has ${bytes(f.pool)}`,
  epoch_rejected: (f) => `Node ${f.node} knows a later term (${f.epoch}) that is not believed`,
};
const BAD_EVENTS = ["node_dead", "node_stream_broken", "node_unreachable", "node_shm_entry_missing", "corrupt_object"];
const WARNING_EVENTS = ["node_reported", "puts_expired", "replicas_missing", "guarantees_exceed_pool", "epoch_rejected"];

const amount = (number, one) => `${number.toLocaleString("en")} ${one}${number === 1 ? "" : "s"}`;

/** A sentence, which opens to the event and its fields as the master's log has them. */
function eventRow(at, event, fields) {
  const raw = shown([event, ...Object.entries(fields).map(([name, value]) => `${name}=${value}`)].join(" "));
  const known = Object.hasOwn(WORDS, event);
  const kind = BAD_EVENTS.includes(event) ? "bad" : WARNING_EVENTS.includes(event) ? "warning" : "";
  const sentence = known ? `${shown(WORDS[event](fields))}.` : raw;
  return element("tr", kind, element("td", "", day(at)), element("td", "", known
    ? element("details", "", element("summary", "", sentence), element("code", "", raw)) : sentence));
}

const told = { run: null, last: 0 };

function showEvents(answer) {
  if (answer.run !== told.run) {
    $("event-rows").replaceChildren();
    const again = told.last > 0;
    Object.assign(told, { run: answer.run, last: 0 });
    if (again) return;  // another start of the master, whose numbers begin at 1
  }
  for (const [, at, event, fields] of answer.events) {
    $("event-rows").prepend(eventRow(at, event, fields));
  }
  told.last = answer.last;
  while ($("event-rows").children.length > EVENTS_MAX) $("event-rows").lastElementChild.remove();
  $("no-events").hidden = $("event-rows").children.length > 0;
}

// --- asking --------------------------------------------------------------------------------------

/** The token is kept by this tab until it is closed, and is in no address. */
const TOKEN = "kvstore-token";

/** GET, or POST of `question` as JSON. */
async function ask(path, question = null, withinMs = ANSWER_MS) {
  const token = sessionStorage.getItem(TOKEN), headers = token ? { Authorization: `Bearer ${token}` } : {};
  const posted = question ? { method: "POST", body: JSON.stringify(question) } : {};
  if (question) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, { cache: "no-store", headers, signal: AbortSignal.timeout(withinMs), ...posted });
  if (answer.status === 401) throw Object.assign(new Error("it needs the token"), { locked: true });
  if (!answer.ok) throw new Error((await answer.text()).trim() || `status ${answer.status}`);
  return answer.json();
}

let view = "overview", status = null, history = null, heardAt = null;

function show() {
  if (!status) return;
  const leads = status.leads;
  const bad = status.problems.filter((problem) => problem.level === "bad").length;
  document.title = `${bad ? `(${bad}) ` : ""}kvstore ${shown(status.cluster)}`;
  put($("cluster"), shown(status.cluster));
  put($("role"), `${leads ? "leads" : "stands by"} · term ${status.epoch} · version ${shown(status.version)}`
    + (leads ? ` · up ${time(Math.floor(status.uptime_ms / 1000))}` : ""));
  showProblems(status.problems, leads);
  document.querySelector("#view-nodes .legend").hidden = leads && !status.nodes.length;
  $("standby").hidden = leads;
  $("tiles").hidden = $("measured").hidden = !leads;
  if (!leads) {
    const link = element("a", "", shown(status.leader));
    if (/^https?:\/\//.test(status.leader_page)) link.href = status.leader_page;
    $("standby").replaceChildren("This master stands by. ", ...(status.leader ? ["The one that leads says how the store is: ", link] : ["It knows of no master that leads."]));
    table($("namespace-rows"), []);
    $("node-cards").replaceChildren();
    $("moved").hidden = true;
    return;
  }
  if (view === "overview") showTiles(status, history);
  if (view === "nodes") {
    each($("node-cards"), status.nodes, nodeCard, showNode);
    showMoved(status.nodes);
  }
  if (view === "namespaces") showNamespaces(status);
  if (view === "prefixes") showSpaces($("chains-of"), []);
  if (view === "misses") showMisses();
}

// The first one tells whether the master answers at all.
const POLLS = [
  { every: STATUS_MS, wanted: () => true, run: async () => { status = await ask("api/v1/status"); heardAt = Date.now(); noteMoved(status.nodes || []); show(); } },
  { every: HISTORY_MS, wanted: () => view === "overview", run: async () => {
    history = await ask("api/v1/history");
    charts.forEach((chart) => chart.draw(history));
    showCalls(history.calls);
  } },
  { every: STATUS_MS, wanted: () => view === "events", run: async () => {
    showEvents(await ask(`api/v1/cluster-events?after=${told.last}`));
  } },
  { every: FLEET_MS, wanted: () => ["prefixes", "namespaces", "misses"].includes(view) && status?.leads !== false, run: async () => {
    showFleet((await ask("api/v1/fleet")).models);
    show();
  } },
];

function showLost(error) {
  $("token").hidden = !error.locked;
  $("lost").hidden = Boolean(error.locked);
  if (error.locked) return;
  const since = heardAt ? ` What is shown is of ${clock(heardAt)}.` : "";
  put($("lost"), `The master does not answer (${shown(error.message)}).${since}`);
}

/** Asks again and again, one question at a time, while the page is visible and the view wants it. */
async function poll(what) {
  clearTimeout(what.timer);
  if (what.running) return;
  let pause = what.every;
  if (!document.hidden && what.wanted()) {
    what.running = true;
    try {
      await what.run();
      if (what === POLLS[0]) $("lost").hidden = $("token").hidden = true;
    } catch (error) {
      pause = Math.min(pause, AGAIN_MS);
      if (what === POLLS[0]) showLost(error);
    } finally {
      what.running = false;
    }
  }
  what.timer = setTimeout(poll, pause, what);
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
