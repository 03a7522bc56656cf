"use strict";
// The view of prefixes: the most used chains as a tree of branches, and the blocks of one branch.
// It uses the functions of page.js.

const CHAINS_MS = 4000, LEVELS_MAX = 12, PAGE_BLOCKS = 50;

// Initially open: the first namespaces, with their first chains; all branches of a small namespace.
const SPACES_SHOWN = 20, SPACES_OPEN = 3, ROOTS_SHOWN = 4, UNFOLDED_MAX = 6;

const ORDERS = {
  matched: (branch) => -branch.matched,
  used: (branch) => branch.idle_ms,
  size: (branch) => -branch.total_size,
};

/** Shortens a long key to its beginning and end. */
function shortKey(text) {
  const signs = Array.from(escapeText(text));
  return signs.length > 30 ? `${signs.slice(0, 20).join("")}…${signs.slice(-6).join("")}` : signs.join("");
}

function ageClass(ms) {
  return ms < 60e3 ? "now" : ms < 600e3 ? "soon" : ms < 3600e3 ? "hour" : "old";
}

const plural = (number, one, many) => `${number.toLocaleString("en")} ${number === 1 ? one : many}`;

// --- the tree ------------------------------------------------------------------------------------

let chains = null;

/** Namespaces, branches and lists that a click has opened (true) or closed. */
const folds = new Map();
const isOpen = (id, atFirst) => folds.get(id) ?? atFirst;

function fold(id, open) {
  folds.set(id, open);
  showTree();
}

/** The namespaces of the branches in the chosen order, each with its tree. */
function treesOf(branches) {
  const order = ORDERS[$("chains-order").value] || ORDERS.matched;
  const children = branches.map(() => []), trees = new Map();
  branches.forEach((branch, index) => {
    branch.total_size = branch.size;
    if (branch.above) { children[branch.above - 1].push(index); return; }
    if (!trees.has(branch.namespace)) trees.set(branch.namespace, { name: branch.namespace, roots: [], branches: 0 });
    trees.get(branch.namespace).roots.push(index);
  });
  for (let index = branches.length - 1; index >= 0; index--) {
    const branch = branches[index];
    if (branch.above) branches[branch.above - 1].total_size += branch.total_size;
    trees.get(branch.namespace).branches++;
  }
  const by = (one, other) => order(branches[one]) - order(branches[other]);
  for (const list of [...children, ...[...trees.values()].map((tree) => tree.roots)]) list.sort(by);
  return [...trees.values()].sort((one, other) => by(one.roots[0], other.roots[0])).map((tree) => ({ ...tree, children }));
}

/** The rows of one namespace: its branches, descendants of open ones, and the numbers of hidden ones. */
function rowsOf(tree, branches) {
  const small = tree.branches <= UNFOLDED_MAX, all = `all ${tree.name}`;
  const shownRoots = small || isOpen(all, false) ? tree.roots : tree.roots.slice(0, ROOTS_SHOWN);
  const rows = [], waiting = shownRoots.map((index) => [index, 0]).reverse();
  while (waiting.length) {
    const [index, level] = waiting.pop(), branch = branches[index];
    if (branch === undefined) { rows.push({ others: `${plural(-index, "more branch", "more branches")} not shown`, level }); continue; }
    const id = `branch ${tree.name} ${branch.key}`, open = isOpen(id, small);
    rows.push({ branch, level, id, open });
    if (!open) continue;
    const hidden = branch.children - tree.children[index].length;
    if (hidden > 0) waiting.push([-hidden, level + 1]);
    waiting.push(...tree.children[index].map((child) => [child, level + 1]).reverse());
  }
  const rest = tree.roots.length - shownRoots.length;
  if (rest) rows.push({ level: 0, more: `Show ${plural(rest, "more chain", "more chains")}`, id: all });
  return rows;
}

function branchRow() {
  const fold_ = element("button", "fold"), branch = element("button", "branch", element("span", "name"), element("span", "bar", element("i")), element("span", "quiet"));
  const more = element("button", "more"), item = element("li", "", fold_, branch, element("p", "quiet"), more);
  for (const button of [fold_, branch, more]) button.type = "button";
  fold_.addEventListener("click", () => fold(item.row.id, !item.row.open));
  more.addEventListener("click", () => fold(item.row.id, true));
  branch.addEventListener("click", () => openBranch(item.row.branch));
  return item;
}

function showBranch(item, row, largest) {
  const [fold_, button, others, more] = item.children, { branch } = row;
  item.row = row;
  item.style.marginLeft = `calc(${Math.min(row.level, LEVELS_MAX)} * var(--step))`;
  button.hidden = !branch;
  others.hidden = !row.others;
  more.hidden = !row.more;
  fold_.hidden = !branch?.children;
  put(others, row.others || "");
  put(more, row.more || "");
  if (!branch) return;
  put(fold_, row.open ? "▾" : "▸");
  fold_.setAttribute("aria-expanded", row.open);
  fold_.setAttribute("aria-label", `${plural(branch.children, "branch", "branches")} of ${shortKey(branch.last)}`);
  const [name, bar, text] = button.children;
  put(name, `${branch.blocks > 1 ? `${shortKey(branch.first)} … ` : ""}${shortKey(branch.last)}`);
  bar.firstChild.className = ageClass(branch.idle_ms);
  bar.firstChild.style.width = `${Math.max(1, 100 * branch.size / largest)}%`;
  put(text, [
    plural(branch.blocks, "block", "blocks"), bytes(branch.size),
    branch.matched ? `matched ${plural(branch.matched, "time", "times")} in ${time(Math.floor(branch.counted_ms / 1000))}` : "no matches counted",
    `idle ${time(branch.idle_ms / 1000)}`,
    ...(branch.children ? [plural(branch.children, "branch", "branches")] : []),
    ...(branch.missing ? [`${plural(branch.missing, "block", "blocks")} missing`] : []),
    ...(branch.being_written ? [`${branch.being_written.toLocaleString("en")} being written`] : []),
    ...(branch.pinned ? [`${branch.pinned.toLocaleString("en")} pinned`] : []),
    ...(branch.truncated ? ["truncated"] : []),
    Object.keys(branch.nodes).map((node) => `on ${escapeText(node)}`).join(", ") || "no node",
  ].join(" · "));
}

function spaceSection() {
  const button = element("button", "", element("span", "fold"), element("bdi"), element("span", "quiet"));
  button.type = "button";
  const section = element("section", "space", element("h2", "", button), element("p", "quiet"), element("ul"));
  button.addEventListener("click", () => fold(section.tree.id, !section.tree.open));
  return section;
}

function showSpace(section, tree) {
  const [head, text, list] = section.children, button = head.firstChild;
  section.tree = tree;
  button.setAttribute("aria-expanded", tree.open);
  put(button.children[0], tree.open ? "▾" : "▸");
  put(button.children[1], escapeText(tree.name));
  put(button.children[2], modelOf.get(tree.name) || "");
  const roots = tree.roots.map((index) => chains.branches[index]);
  put(text, [plural(roots.length, "chain", "chains"), plural(tree.branches, "branch", "branches"), bytes(sum(roots.map((root) => root.total_size))),
    `matched ${plural(sum(roots.map((root) => root.matched)), "time", "times")}`, `idle ${time(Math.min(...roots.map((root) => root.idle_ms)) / 1000)}`].join(" · "));
  list.hidden = !tree.open;
  list.setAttribute("aria-label", `Chains of ${escapeText(tree.name)}, as branches`);
  updateChildren(list, tree.open ? rowsOf(tree, chains.branches) : [], branchRow, (item, row) => showBranch(item, row, tree.largest));
}

function showTree() {
  const trees = treesOf(chains.branches), largest = Math.max(1, ...chains.branches.map((branch) => branch.size));
  const wanted = isOpen("spaces", false) ? trees : trees.slice(0, SPACES_SHOWN);
  updateChildren($("chains"), wanted.map((tree, index) => ({ ...tree, largest, id: `space ${tree.name}`, open: isOpen(`space ${tree.name}`, index < SPACES_OPEN) })), spaceSection, showSpace);
  $("chains-more").hidden = wanted.length === trees.length;
  put($("chains-more"), `Show ${plural(trees.length - wanted.length, "more namespace", "more namespaces")}`);
}

function showChains(response) {
  chains = response;
  showTree();
  put($("chains-note"), !response.branches.length ? "No chains stored."
    : `${response.complete ? "" : "Some chains or branches are truncated. "}`
      + `Matches are counted since this master became the leader (${time(Math.floor(response.uptime_ms / 1000))} ago), at the last matched blocks.`);
}

/** Fills a list of namespaces, with engine and model: those with objects, and `more` names. */
function showSpaces(select, more) {
  if (document.activeElement === select) return;  // it may be open
  const rows = status?.leads ? status.namespaces : [], chosen = select.value, held = new Set(rows.map((row) => row.name));
  const model = (name) => modelOf.has(name) ? ` (${modelOf.get(name)})` : "";
  const options = [["", select.options[0].text],
    ...rows.map((row) => [row.name, `${escapeText(row.name)}${model(row.name)}: ${count(row.objects)} objects, ${bytes(row.size)}`]),
    ...more.filter((name) => !held.has(name)).map((name) => [name, `${escapeText(name)}${model(name)}: no objects`])];
  if (!options.some(([name]) => name === chosen)) options.push([chosen, escapeText(chosen)]);
  updateChildren(select, options, () => element("option"), (option, [name, text]) => {
    if (option.value !== name) option.value = name;
    put(option, text);
  });
  select.value = chosen;
}

async function loadChains() {
  const space = $("chains-of").value;
  try {
    const response = await request(`api/v1/chains?namespace=${encodeURIComponent(space)}`);
    if (space !== $("chains-of").value) return await loadChains();
    showChains(response);
  } catch (error) {
    put($("chains-note"), `Not available: ${escapeText(error.message)}`);
    throw error;
  }
}

// --- one branch ----------------------------------------------------------------------------------

let opened = null;

const BLOCK_HEADS = ["block", "state", "bytes", "idle", "leased", "on"];

function blockRow(block) {
  const texts = [block.state, block.state === "complete" ? bytes(block.size) : "",
    block.state === "absent" ? "" : time(block.idle_ms / 1000),
    block.leased_ms ? time(block.leased_ms / 1000) : "", block.nodes.map(escapeText).join(", ")];
  return element("tr", block.state === "complete" ? "" : "warning", element("td", "name", shortKey(block.text)), ...texts.map((text) => element("td", "", text)));
}

function openBranch(branch) {
  opened = { branch, remaining: branch.blocks, next: branch.key };
  put($("branch-title"), escapeText(branch.namespace));
  put($("branch-text"), [
    `${plural(branch.blocks, "block", "blocks")}, ${bytes(branch.size)}`,
    `from ${escapeText(branch.first)} to ${escapeText(branch.last)}`,
    `${plural(branch.depth, "block", "blocks")} before its last block`,
    `${plural(branch.matched, "match", "matches")} counted here and in descendants, ${branch.matches_ended.toLocaleString("en")} ended at its last block`,
    `${plural(branch.children, "branch", "branches")}`,
    branch.leased_ms ? `leased for ${time(branch.leased_ms / 1000)} more` : "not leased",
    ...Object.entries(branch.nodes).map(([node, replicas]) => `${plural(replicas, "replica", "replicas")} on ${escapeText(node)}`),
  ].join(" · "));
  $("branch-blocks").replaceChildren(element("table", "", element("thead", "", element("tr", "", ...BLOCK_HEADS.map(headCell))), element("tbody")));
  put($("branch-note"), "");
  $("branch").showModal();
  moreBlocks();
}

/** The next blocks of the branch, from its last block towards the root. */
async function moreBlocks() {
  const of = opened;
  $("branch-more").hidden = true;
  if (!of || of.remaining <= 0 || !of.next) return;
  const above = Math.min(PAGE_BLOCKS, of.remaining) - 1;
  try {
    const response = await request(`api/v1/blocks?namespace=${encodeURIComponent(of.branch.namespace)}&key=${of.next}&above=${above}`);
    if (of !== opened) return;
    const body = $("branch-blocks").querySelector("tbody");
    body.append(...response.blocks.map(blockRow));
    of.remaining -= above + 1;
    of.next = response.blocks.at(-1)?.parent;
    put($("branch-more"), `Show more of ${of.remaining.toLocaleString("en")}`);
    $("branch-more").hidden = of.remaining <= 0 || !of.next;
  } catch (error) {
    put($("branch-note"), `Not available: ${escapeText(error.message)}`);
  }
}

// --- queries -------------------------------------------------------------------------------------

const CHAINS_POLL = { every: CHAINS_MS, isNeeded: () => view === "prefixes" && status?.leads !== false, run: loadChains };
POLLS.push(CHAINS_POLL);
$("chains-of").addEventListener("change", () => poll(CHAINS_POLL));
$("chains-order").addEventListener("change", () => chains && showTree());
$("chains-more").addEventListener("click", () => fold("spaces", true));
$("branch-more").addEventListener("click", moreBlocks);
$("branch-close").addEventListener("click", () => $("branch").close());
poll(CHAINS_POLL);
