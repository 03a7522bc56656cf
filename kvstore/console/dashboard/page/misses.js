"use strict";
// The view of misses: their causes, traffic of engines, and evictions. It uses the functions of page.js and prefixes.js.

const TRAFFIC_MS = 4000, WHY_MS = 12000;

let traffic = null, explained = null;

const ago = (ms) => `${time(ms / 1000)} ago`;

function showMisses() {
  showSpaces($("why-of"), traffic ? traffic.namespaces.map((row) => row.name) : []);
}

// --- why -----------------------------------------------------------------------------------------

function causeItem(cause) {
  const lines = cause.lines;
  return element("li", cause.is_problem ? "warning" : "well", element("p", "", `${escapeText(cause.text)}${lines.length ? ":" : "."}`),
    ...(lines.length ? [element("ul", "", ...lines.map((line) => element("li", "", escapeText(line))))] : []),
    ...(cause.remedy ? [element("p", "", `What to do: ${escapeText(cause.remedy)}`)] : []));
}

function groupCard(group) {
  const clientName = (row) => `${escapeText(row.client || "unnamed client")}${row.address ? ` (${escapeText(row.address)})` : ""}, ${ago(row.idle_ms)}`;
  const lines = [
    ...group.writers.map((row) => `${clientName(row)}, put ${row.stored.toLocaleString("en")} of ${plural(row.keys, "key", "keys")}${row.found ? `; ${row.found.toLocaleString("en")} already stored` : ""}`),
    ...group.readers.map((row) => `${clientName(row)}, found ${row.found.toLocaleString("en")} of ${plural(row.keys, "key", "keys")}`),
  ];
  const miss = group.missed;
  if (miss) lines.push(`The last missed key is ${shortKey(miss.text)}${miss.evicted ? " (evicted before)" : ""}${miss.present ? " (stored now)" : ""}: number ${(miss.found + 1).toLocaleString("en")} of ${miss.requested.toLocaleString("en")}, requested by ${escapeText(miss.client || "a client")} ${ago(miss.idle_ms)}`);
  return element("div", "model", element("h3", "", `${group.model ? `${escapeText(group.model)}  ` : ""}${escapeText(group.name)}`),
    element("p", "quiet", `${plural(group.objects, "object", "objects")}, ${bytes(group.size)}${group.evicted ? `, ${group.evicted.toLocaleString("en")} evicted` : ""}`),
    ...(lines.length ? lines : ["no traffic"]).map((line) => element("p", "", line)));
}

/** Loads the causes of misses in the chosen namespace, or in all. */
async function loadDiagnosis() {
  const space = $("why-of").value, loading = explained = { space };
  put($("why-note"), "Loading…");
  try {
    const response = await request(`api/v1/why?namespace=${encodeURIComponent(space)}`, null, WHY_MS);
    if (loading !== explained) return;
    $("why-causes").replaceChildren(...response.causes.map(causeItem));
    $("why-groups").replaceChildren(...response.groups.map(groupCard), ...(response.others ? [element("p", "quiet", `${response.others.toLocaleString("en")} more not shown`)] : []));
    $("why-seen").hidden = !response.groups.length;
    put($("why-note"), [`As of ${clock(Date.now())}. The master has recorded traffic for ${time(Math.floor(response.uptime_ms / 1000))}.`,
      ...response.notes.map((note) => `${escapeText(note)}.`)].join(" "));
  } catch (error) {
    if (loading !== explained) return;
    $("why-causes").replaceChildren();
    $("why-seen").hidden = true;
    put($("why-note"), `Not available: ${escapeText(error.message)}`);
  }
}

// --- traffic -------------------------------------------------------------------------------------

function showTraffic(response) {
  traffic = response;
  const number = (value) => [value.toLocaleString("en"), "number"];
  put($("traffic-note"), `Counted since this master became the leader (${time(Math.floor(response.uptime_ms / 1000))} ago). Reads from a client's location cache are not counted.`);
  const engines = response.engines.map((row) => [
    [escapeText(row.client || "unnamed"), "name"], [escapeText(row.address)], number(row.namespaces), number(row.put), [bytes(row.put_bytes), "number"], number(row.queries),
    [row.queries ? percent(row.found / row.queries) : "", "number"], [ago(row.idle_ms), "number"],
  ]);
  table($("engine-rows"), engines.length ? engines : [[["no traffic yet"], [""], [""], [""], [""], [""], [""], [""]]]);
  const spaces = response.namespaces.map((row) => [
    [escapeText(row.name), "name"], [modelOf.get(row.name) || ""], number(row.evicted),
    [row.evicted ? ago(row.evicted_ms) : "", "number"], [row.evicted ? time(row.evicted_idle_ms / 1000) : "", "number"],
    number(row.queries), [row.queries ? percent(row.queries_without_hit / row.queries) : "", "number"],
  ]);
  table($("eviction-rows"), spaces.length ? spaces : [[["no traffic yet"], [""], [""], [""], [""], [""], [""]]]);
}

const TRAFFIC_POLL = { every: TRAFFIC_MS, isNeeded: () => view === "misses" && status?.leads !== false, run: async () => {
  if (!explained) loadDiagnosis();
  try {
    showTraffic(await request("api/v1/traffic"));
  } catch (error) {
    put($("traffic-note"), `Not available: ${escapeText(error.message)}`);
    throw error;
  }
} };
POLLS.push(TRAFFIC_POLL);
$("why-of").addEventListener("change", loadDiagnosis);
$("why-again").addEventListener("click", loadDiagnosis);
poll(TRAFFIC_POLL);
