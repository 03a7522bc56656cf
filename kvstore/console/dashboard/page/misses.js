"use strict";
// The view of misses: why lookups find nothing, who puts and asks, and what was evicted. It uses the functions of
// page.js and prefixes.js.

const TRAFFIC_MS = 4000, WHY_MS = 12000;

let traffic = null, explained = null;

const ago = (ms) => `${time(ms / 1000)} ago`;

function showMisses() {
  showSpaces($("why-of"), traffic ? traffic.namespaces.map((row) => row.name) : []);
}

// --- why -----------------------------------------------------------------------------------------

function causeItem(cause) {
  const lines = cause.lines;
  return element("li", cause.is_problem ? "warning" : "well", element("p", "", `${shown(cause.text)}${lines.length ? ":" : "."}`),
    ...(lines.length ? [element("ul", "", ...lines.map((line) => element("li", "", shown(line))))] : []),
    ...(cause.remedy ? [element("p", "", `What to do: ${shown(cause.remedy)}`)] : []));
}

function groupCard(party) {
  const who = (row) => `${shown(row.client || "a client without a name")}${row.address ? ` (${shown(row.address)})` : ""}, ${ago(row.idle_ms)}`;
  const lines = [
    ...party.writers.map((row) => `${who(row)}, put ${row.stored.toLocaleString("en")} of ${few(row.keys, "key", "keys")}${row.found ? `; ${row.found.toLocaleString("en")} were there` : ""}`),
    ...party.readers.map((row) => `${who(row)}, found ${row.found.toLocaleString("en")} of ${few(row.keys, "key", "keys")}`),
  ];
  const miss = party.missed;
  if (miss) lines.push(`The last missed key is ${shortKey(miss.text)}${miss.evicted ? " (it had been evicted)" : ""}${miss.present ? " (it is there now)" : ""}: number ${(miss.found + 1).toLocaleString("en")} of ${miss.requested.toLocaleString("en")}, asked by ${shown(miss.client || "a client")} ${ago(miss.idle_ms)}`);
  return element("div", "model", element("h3", "", `${party.model ? `${shown(party.model)}  ` : ""}${shown(party.name)}`),
    element("p", "quiet", `${few(party.objects, "object", "objects")}, ${bytes(party.size)}${party.evicted ? `, ${party.evicted.toLocaleString("en")} evicted` : ""}`),
    ...(lines.length ? lines : ["neither put nor asked"]).map((line) => element("p", "", line)));
}

/** Asks why nothing is found in the chosen namespace, or anywhere. */
async function askWhy() {
  const space = $("why-of").value, asking = explained = { space };
  put($("why-note"), "Looking…");
  try {
    const answer = await ask(`api/v1/why?namespace=${encodeURIComponent(space)}`, null, WHY_MS);
    if (asking !== explained) return;
    $("why-causes").replaceChildren(...answer.causes.map(causeItem));
    $("why-groups").replaceChildren(...answer.groups.map(groupCard), ...(answer.others ? [element("p", "quiet", `and ${answer.others.toLocaleString("en")} more`)] : []));
    $("why-seen").hidden = !answer.groups.length;
    put($("why-note"), [`As of ${clock(Date.now())}, from what the master remembers of the ${time(Math.floor(answer.uptime_ms / 1000))} since its start.`,
      ...answer.notes.map((note) => `${shown(note)}.`)].join(" "));
  } catch (error) {
    if (asking !== explained) return;
    $("why-causes").replaceChildren();
    $("why-seen").hidden = true;
    put($("why-note"), `Not known now: ${shown(error.message)}`);
  }
}

// --- traffic -------------------------------------------------------------------------------------

function showTraffic(answer) {
  traffic = answer;
  const number = (value) => [value.toLocaleString("en"), "number"];
  put($("traffic-note"), `In the ${time(Math.floor(answer.uptime_ms / 1000))} since this master leads, as far as it remembers. A client that still knows where a block is does not ask again.`);
  const engines = answer.engines.map((row) => [
    [shown(row.client || "without a name"), "name"], [shown(row.address)], number(row.namespaces), number(row.put), [bytes(row.put_bytes), "number"], number(row.queries),
    [row.queries ? percent(row.found / row.queries) : "", "number"], [ago(row.idle_ms), "number"],
  ]);
  table($("engine-rows"), engines.length ? engines : [[["no client has put or asked"], [""], [""], [""], [""], [""], [""], [""]]]);
  const spaces = answer.namespaces.map((row) => [
    [shown(row.name), "name"], [modelOf.get(row.name) || ""], number(row.evicted),
    [row.evicted ? ago(row.evicted_ms) : "", "number"], [row.evicted ? time(row.evicted_idle_ms / 1000) : "", "number"],
    number(row.queries), [row.queries ? percent(row.queries_without_hit / row.queries) : "", "number"],
  ]);
  table($("eviction-rows"), spaces.length ? spaces : [[["no client has put or asked"], [""], [""], [""], [""], [""], [""]]]);
}

const TRAFFIC_POLL = { every: TRAFFIC_MS, wanted: () => view === "misses" && status?.leads !== false, run: async () => {
  if (!explained) askWhy();
  try {
    showTraffic(await ask("api/v1/traffic"));
  } catch (error) {
    put($("traffic-note"), `Not known now: ${shown(error.message)}`);
    throw error;
  }
} };
POLLS.push(TRAFFIC_POLL);
$("why-of").addEventListener("change", askWhy);
$("why-again").addEventListener("click", askWhy);
poll(TRAFFIC_POLL);
