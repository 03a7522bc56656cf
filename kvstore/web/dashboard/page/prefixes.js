"use strict";
// The view of prefixes: the chains that are used most as a tree of branches, the blocks of one branch, and where
// pasted keys are. It uses the functions of page.js.

const CHAINS_MS = 4000, LEVELS_MAX = 12, PAGE_BLOCKS = 50, FIND_MS = 12000;

const ORDERS = {
  matched: (branch) => -branch.matched,
  used: (branch) => branch.idle_ms,
  size: (branch) => -branch.whole_size,
};

/** A long key, with its beginning and end. */
function shortKey(text) {
  const signs = Array.from(shown(text));
  return signs.length > 30 ? `${signs.slice(0, 20).join("")}…${signs.slice(-6).join("")}` : signs.join("");
}

function ageClass(ms) {
  return ms < 60e3 ? "now" : ms < 600e3 ? "soon" : ms < 3600e3 ? "hour" : "old";
}

const few = (number, one, many) => `${number.toLocaleString("en")} ${number === 1 ? one : many}`;

// --- the tree ------------------------------------------------------------------------------------

let chains = null;

/** The branches in the chosen order, each after the one above it, with its level; and rows for continuations that
 * are not in the answer. */
function treeRows(branches) {
  const order = ORDERS[$("chains-order").value] || ORDERS.matched;
  const below = branches.map(() => []), roots = [];
  branches.forEach((branch, index) => {
    branch.whole_size = branch.size;
    (branch.above ? below[branch.above - 1] : roots).push(index);
  });
  for (let index = branches.length - 1; index >= 0; index--) {
    const above = branches[index].above;
    if (above) branches[above - 1].whole_size += branches[index].whole_size;
  }
  const by = (one, other) => order(branches[one]) - order(branches[other]);
  const rows = [], waiting = roots.sort(by).reverse().map((index) => [index, 0]);
  while (waiting.length) {
    const [index, level] = waiting.pop(), branch = branches[index];
    if (branch === undefined) { rows.push({ hidden: index, level }); continue; }
    rows.push({ branch, level });
    const hidden = branch.children - below[index].length;
    if (hidden > 0) waiting.push([-hidden, level + 1]);
    waiting.push(...below[index].sort(by).reverse().map((each) => [each, level + 1]));
  }
  return rows;
}

function branchRow() {
  const button = element("button", "branch",
    element("span", "name"), element("span", "bar", element("i")), element("span", "quiet"));
  button.type = "button";
  button.addEventListener("click", () => openBranch(button.branch));
  return element("li", "", button, element("p", "quiet"));
}

function showBranch(item, { branch, hidden, level }, largest) {
  const [button, others] = item.children;
  item.className = `level${Math.min(level, LEVELS_MAX)}`;
  button.hidden = hidden !== undefined;
  others.hidden = hidden === undefined;
  if (hidden !== undefined) {
    put(others, `and ${few(-hidden, "other continuation", "other continuations")} that are not shown`);
    return;
  }
  button.branch = branch;
  const [name, bar, text] = button.children;
  const space = $("chains-of").value ? "" : `${shown(branch.namespace)}  `;
  put(name, `${space}${branch.blocks > 1 ? `${shortKey(branch.first)} … ` : ""}${shortKey(branch.last)}`);
  bar.firstChild.className = ageClass(branch.idle_ms);
  bar.firstChild.style.width = `${Math.max(1, 100 * branch.size / largest)}%`;
  put(text, [
    few(branch.blocks, "block", "blocks"), bytes(branch.size),
    branch.matched ? `matched ${few(branch.matched, "time", "times")} in ${time(Math.floor(branch.counted_ms / 1000))}` : "no match counted",
    `unused for ${time(branch.idle_ms / 1000)}`,
    ...(branch.missing ? [`${few(branch.missing, "block", "blocks")} missing`] : []),
    ...(branch.being_written ? [`${branch.being_written.toLocaleString("en")} being written`] : []),
    ...(branch.pinned ? [`${branch.pinned.toLocaleString("en")} pinned`] : []),
    ...(branch.cut ? ["goes on above"] : []),
    Object.keys(branch.nodes).map((node) => `on ${shown(node)}`).join(", ") || "on no node",
  ].join(" · "));
}

function showChains(answer) {
  chains = answer;
  const rows = treeRows(answer.branches);
  const largest = Math.max(1, ...answer.branches.map((branch) => branch.size));
  each($("chains"), rows, branchRow, (item, row) => showBranch(item, row, largest));
  put($("chains-note"), !rows.length ? "No chain is stored here."
    : `${answer.whole ? "" : "There are longer chains or more branches than one answer holds. "}`
      + `Matches are counted since this master leads (${time(Math.floor(answer.uptime_ms / 1000))}), at the blocks that were matched last.`);
}

/** The namespaces to choose from, with the engine and model of each. */
function showSpaces() {
  const rows = status?.leads ? status.namespaces : [];
  const options = [["", "all, the last used ones"], ...rows.map((row) => [row.name,
    `${shown(row.name)}${modelOf.has(row.name) ? ` (${modelOf.get(row.name)})` : ""}: ${count(row.objects)} objects, ${bytes(row.size)}`])];
  const select = $("chains-of"), chosen = select.value;
  if (document.activeElement === select) return;  // it may be open
  if (!options.some(([name]) => name === chosen)) options.push([chosen, shown(chosen)]);
  each(select, options, () => element("option"), (option, [name, text]) => {
    if (option.value !== name) option.value = name;
    put(option, text);
  });
  select.value = chosen;
}

async function askChains() {
  const space = $("chains-of").value;
  try {
    const answer = await ask(`api/v1/chains?namespace=${encodeURIComponent(space)}`);
    if (space !== $("chains-of").value) return await askChains();  // another one was chosen meanwhile
    showChains(answer);
  } catch (error) {
    put($("chains-note"), `Not known now: ${shown(error.message)}`);
    throw error;
  }
}

// --- one branch, and one block -------------------------------------------------------------------

let opened = null;

const BLOCK_HEADS = ["block", "state", "bytes", "unused for", "leased", "on"];

function blockRow(block, namespace) {
  const name = element("button", "block", shortKey(block.text));
  name.type = "button";
  name.addEventListener("click", () => openBlock(block, namespace));
  const texts = [block.state, block.state === "complete" ? bytes(block.size) : "",
    block.state === "absent" ? "" : time(block.idle_ms / 1000),
    block.leased_ms ? time(block.leased_ms / 1000) : "", block.nodes.map(shown).join(", ")];
  return element("tr", block.state === "complete" ? "" : "warning", element("td", "name", name), ...texts.map((text) => element("td", "", text)));
}

function blockTable() {
  return element("table", "", element("thead", "", element("tr", "", ...BLOCK_HEADS.map((text) => element("th", "", text)))), element("tbody"));
}

function openBranch(branch) {
  opened = { branch, left: branch.blocks, next: branch.key };
  put($("branch-title"), shown(branch.namespace));
  put($("branch-text"), [
    `${few(branch.blocks, "block", "blocks")}, ${bytes(branch.size)}`,
    `from ${shown(branch.first)} to ${shown(branch.last)}`,
    `${few(branch.depth, "block", "blocks")} before its last one`,
    `${few(branch.matched, "match", "matches")} counted here and below, ${branch.ended.toLocaleString("en")} ended at its last block`,
    `${few(branch.children, "continuation", "continuations")}`,
    branch.leased_ms ? `leased for ${time(branch.leased_ms / 1000)} more` : "not leased",
    ...Object.entries(branch.nodes).map(([node, replicas]) => `${few(replicas, "replica", "replicas")} on ${shown(node)}`),
  ].join(" · "));
  $("branch-blocks").replaceChildren(blockTable());
  put($("block-text"), "");
  $("branch").showModal();
  moreBlocks();
}

/** The next blocks of the branch, from its last block towards the root. */
async function moreBlocks() {
  const of = opened;
  $("branch-more").hidden = true;
  if (!of || of.left <= 0 || !of.next) return;
  const above = Math.min(PAGE_BLOCKS, of.left) - 1;
  try {
    const answer = await ask(`api/v1/blocks?namespace=${encodeURIComponent(of.branch.namespace)}&key=${of.next}&above=${above}`);
    if (of !== opened) return;
    const body = $("branch-blocks").querySelector("tbody");
    body.append(...answer.blocks.map((block) => blockRow(block, of.branch.namespace)));
    of.left -= above + 1;
    of.next = answer.blocks.at(-1)?.parent;
    put($("branch-more"), `Show more of ${of.left.toLocaleString("en")}`);
    $("branch-more").hidden = of.left <= 0 || !of.next;
  } catch (error) {
    put($("block-text"), `Not known now: ${shown(error.message)}`);
  }
}

async function openBlock(block, namespace) {
  put($("block-text"), "…");
  try {
    const found = await ask(`api/v1/stat?namespace=${encodeURIComponent(namespace)}&key=${block.key}`);
    put($("block-text"), [
      `Block ${shown(found.text)}: ${found.state}`, `${found.size.toLocaleString("en")} bytes`, `version ${found.version}`,
      found.parent ? `continues ${found.parent}` : "the first block of its chain", few(found.children, "continuation", "continuations"),
      `unused for ${time(found.idle_ms / 1000)}`, found.leased_ms ? `leased for ${time(found.leased_ms / 1000)} more` : "not leased",
      block.pinned_ms ? `pinned for ${time(block.pinned_ms / 1000)} more` : "no pin of its own",
      ...found.places.map((place) => `on ${shown(place.node)}, segment ${place.segment} at ${place.offset.toLocaleString("en")}`),
    ].join(" · "));
  } catch (error) {
    put($("block-text"), `Block ${shown(block.text)}: ${shown(error.message)}`);
  }
}

// --- pasted keys ---------------------------------------------------------------------------------

function foundText(found, keys) {
  const missing = found.blocks[found.leading];
  const nodes = [...new Set(found.blocks.flatMap((block) => block.nodes))];
  return [
    `${shown(found.namespace)}: ${found.found.toLocaleString("en")} of ${few(keys, "block is", "blocks are")} there`,
    ...(missing ? [`number ${found.leading + 1} (${shortKey(missing.text)}) is ${missing.state === "being_written" ? "being written" : "missing"}`] : []),
    ...(found.chain ? [] : ["they are not one chain"]),
    ...(nodes.length ? [`on ${nodes.map(shown).join(", ")}`] : []),
  ].join("; ") + ".";
}

async function find(event) {
  event.preventDefault();
  const space = $("chains-of").value, text = $("find-text").value;
  put($("find-note"), "Looking…");
  $("find-found").replaceChildren();
  try {
    const answer = await ask("api/v1/find", space ? { text, namespaces: [space] } : { text }, FIND_MS);
    const where = `in ${few(answer.looked_in, "namespace", "namespaces")}`;
    put($("find-note"), answer.found_in.length ? `Found ${where}:` : `None of ${few(answer.keys, "block", "blocks")} is there, ${where}.`);
    $("find-found").replaceChildren(...answer.found_in.map((found) => {
      const body = blockTable();
      body.lastElementChild.append(...found.blocks.map((block) => blockRow(block, found.namespace)));
      const details = element("details", "model", element("summary", "", foundText(found, answer.keys)), element("div", "wide", body));
      // The text of a block is in the dialog of branches.
      details.addEventListener("click", ({ target }) => {
        if (!target.classList.contains("block")) return;
        opened = null;
        put($("branch-title"), shown(found.namespace));
        put($("branch-text"), "");
        $("branch-blocks").replaceChildren();
        $("branch-more").hidden = true;
        $("branch").showModal();
      });
      return details;
    }), ...(answer.others ? [element("p", "quiet", `and in ${few(answer.others, "other namespace", "other namespaces")}`)] : []));
  } catch (error) {
    put($("find-note"), shown(error.message));
  }
}

// --- asking --------------------------------------------------------------------------------------

const CHAINS_POLL = { every: CHAINS_MS, wanted: () => view === "prefixes" && status?.leads !== false, run: askChains };
POLLS.push(CHAINS_POLL);
$("chains-of").addEventListener("change", () => poll(CHAINS_POLL));
$("chains-order").addEventListener("change", () => chains && showChains(chains));
$("find").addEventListener("submit", find);
$("branch-more").addEventListener("click", moreBlocks);
$("branch-close").addEventListener("click", () => $("branch").close());
poll(CHAINS_POLL);
