"use strict";
// Blocks in the view of events: what the store says becomes visible and goes, a sentence a second for each namespace.
// It needs a master with --events, and uses the functions of page.js.

const FLUSH_MS = 1000, RAW_MAX = 20, GROUPS_MAX = 50;

const BLOCK_WORDS = {
  stored: (group) => `Stored ${amount(group.number, "block")} (${bytes(group.size)}) of namespace ${group.namespace}`,
  removed: (group) => `${amount(group.number, "block")} of namespace ${group.namespace} ${group.number === 1 ? "is" : "are"} gone: evicted, removed, over their time or lost`,
};

let following = null;

/** Adds one event of the stream to the sentence of its second. */
function noteBlock(groups, event, fields) {
  const name = `${event} ${fields.namespace}`;
  if (!groups.has(name) && groups.size === GROUPS_MAX) return;
  const group = groups.get(name) ?? { event, namespace: fields.namespace, number: 0, size: 0, raw: [] };
  groups.set(name, group);
  group.number++;
  group.size += fields.size ?? 0;
  if (group.raw.length < RAW_MAX) group.raw.push([event, ...Object.entries(fields).map(([field, value]) => `${field}=${value}`)].join(" "));
}

function showBlocks(groups) {
  const rows = [...groups.values()].map((group) => {
    const more = group.number - group.raw.length, raw = group.raw.map(shown).join("\n");
    return element("tr", "", element("td", "", day(Date.now())), element("td", "", element("details", "",
      element("summary", "", `${shown(BLOCK_WORDS[group.event](group))}.`), element("code", "", more ? `${raw}\nand ${more.toLocaleString("en")} more` : raw))));
  });
  groups.clear();
  $("event-rows").prepend(...rows);
  trimEvents();
}

/** Reads the stream until it ends, or until this is no longer wanted. */
async function followBlocks() {
  const stop = new AbortController(), groups = new Map(), token = sessionStorage.getItem(TOKEN);
  following = stop;
  put($("blocks-note"), "");
  const timer = setInterval(() => groups.size && showBlocks(groups), FLUSH_MS);
  try {
    const answer = await fetch("api/v1/events", { cache: "no-store", signal: stop.signal, headers: token ? { Authorization: `Bearer ${token}` } : {} });
    if (!answer.ok) throw new Error((await answer.text()).trim() || `status ${answer.status}`);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = "", event = "";;) {
      const { value, done } = await reader.read();
      if (done) throw new Error("the stream has ended");
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("event: ")) event = line.slice(7);
        else if (line.startsWith("data: ") && Object.hasOwn(BLOCK_WORDS, event)) noteBlock(groups, event, JSON.parse(line.slice(6)));
      }
    }
  } catch (error) {
    if (!stop.signal.aborted) put($("blocks-note"), `Blocks are not followed: ${shown(error.message)}`);
  } finally {
    clearInterval(timer);
    if (following === stop) endBlocks();
  }
}

function endBlocks() {
  following?.abort();
  following = null;
  $("blocks").checked = false;
}

$("blocks").addEventListener("change", () => $("blocks").checked ? followBlocks() : endBlocks());
addEventListener("hashchange", () => view === "events" || endBlocks());
document.addEventListener("visibilitychange", () => document.hidden && endBlocks());
