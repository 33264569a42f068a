"use strict";
(() => {
const PAGE = JSON.parse(document.getElementById("pairs").textContent);
const PAIRS = PAGE.pairs, TWO = PAGE.runs.length > 1, LAST = PAGE.runs.length - 1, BATCH = 48, FIRST = PAGE.first ?? BATCH;
const GRADES = ["wrong", "type right", "all right"];
const find = id => document.getElementById(id);
const controls = find("controls"), viewer = find("viewer"), cards = find("cards");
const field = name => controls.elements[name];

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children.filter(child => child !== null));
  return element;
}

// ---- facts about a pair ----
const NOUN = PAIRS.some(pair => pair.question !== null) ? "records" : "pairs";
const MEASURE = TWO ? "difference" : "score";
const protocolOf = pair => field("protocol").value || Object.keys(pair.scores)[0];
function scoreOf(pair, run, column = Number(field("column").value)) {
  const scores = pair.scores[protocolOf(pair)];
  return scores === undefined ? null : scores[run][column] ?? null;
}
function measure(pair) {
  const last = scoreOf(pair, LAST), first = TWO ? scoreOf(pair, 0) : 0;
  return last === null || first === null ? null : last - first;
}
const changes = pair => pair.types[0] === "none" && pair.types.length === 1 ? 0 : pair.types.length || null;
const title = pair => pair.question !== null ? pair.kind || "question" : changes(pair) === 0 ? "no change" : pair.types.join(", ") || "type unknown";
const times100 = value => value === null ? "–" : (100 * value).toFixed(1);
const signed = value => value === null ? "–" : (value > 0 ? "+" : "") + (100 * value).toFixed(1);
const WORDS = PAIRS.map(pair => [pair.id, ...pair.history.flat(), pair.question ?? "", ...pair.references, ...pair.captions.flatMap(c => c.clauses.map(part => part[0]))].join("\n").toLowerCase());
PAIRS.forEach((pair, place) => { pair.words = WORDS[place]; pair.place = place; });

// ---- filters and order ----
const GROUPS = {
  "": () => true,
  one: pair => changes(pair) === 1 || changes(pair) === null,
  several: pair => changes(pair) > 1,
  none: pair => changes(pair) === 0,
};
const JUDGED = TWO ? {
  "": () => true,
  gained: pair => pair.captions[1].grade === 2 && pair.captions[0].grade < 2,
  lost: pair => pair.captions[0].grade === 2 && pair.captions[1].grade < 2,
  differ: pair => said(pair, 0) !== said(pair, 1),
} : {
  "": () => true,
  right: pair => pair.captions[0].grade === 2,
  type: pair => pair.captions[0].grade >= 1,
  wrong: pair => pair.captions[0].grade !== null && pair.captions[0].grade < 2,
};
const said = (pair, run) => pair.captions[run].clauses.map(part => part[0]).join("\n");
const byPlace = (a, b) => a.place - b.place;
const byId = (a, b) => a.id < b.id ? -1 : a.id > b.id ? 1 : 0;
function byMeasure(sign, of = value => value) {  // pairs without a score come last
  return (a, b) => {
    const x = measure(a), y = measure(b);
    if (x === null || y === null) return (x === null) - (y === null) || byId(a, b);
    return sign * (of(x) - of(y)) || byId(a, b);
  };
}
const typePlace = pair => pair.types.length ? Math.min(...pair.types.map(type => PAGE.types.indexOf(type))) + (pair.types.length > 1 ? 1000 : 0) : 2000;
const ORDERS = {
  low: byMeasure(1), high: byMeasure(-1), most: byMeasure(-1, Math.abs), id: byId, order: byPlace,
  type: (a, b) => typePlace(a) - typePlace(b) || byMeasure(1)(a, b),
};
let each = false, shown = [], drawn = 0, opened = -1;

function matchingPairs() {
  const text = field("text").value.trim().toLowerCase().split(/\s+/).filter(Boolean);
  const dataset = field("dataset").value, protocol = field("protocol").value, type = field("type").value, kind = field("kind").value;
  const group = GROUPS[field("changes").value], judged = JUDGED[field("grade").value];
  const bound = name => field(name).value === "" ? null : Number(field(name).value) / 100;
  const low = bound("low"), high = bound("high");
  const matches = PAIRS.filter(pair => {
    if (dataset && pair.dataset !== dataset || protocol && !(protocol in pair.scores)) return false;
    if (kind && pair.kind !== kind || type && !pair.types.includes(type) || !group(pair) || !judged(pair)) return false;
    if (low !== null || high !== null) {
      const value = measure(pair);
      if (value === null || low !== null && value < low || high !== null && value > high) return false;
    }
    return text.every(word => pair.words.includes(word));
  });
  return (each ? medians(matches) : matches).sort(ORDERS[field("sort").value]);
}

const sortOf = pair => pair.question !== null ? `question ${title(pair)}` : changes(pair) > 1 ? "several" : title(pair) + " " + (pair.types.length ? "" : pair.dataset);
const SORTS = new Set(PAIRS.map(sortOf)).size;
function medians(pairs) {  // returns the pair with the median score for each sort of pair
  const sorts = new Map();
  for (const pair of pairs) {
    const sort = sortOf(pair);
    sorts.set(sort, [...(sorts.get(sort) || []), pair]);
  }
  return [...sorts.values()].map(members => members.sort(byMeasure(1))[members.length >> 1]);
}

// ---- views: a button sets several controls ----
const VIEWS = (TWO ? [
  ["Differ most", {sort: "most"}], [`${PAGE.runs[1]} better`, {sort: "high"}], [`${PAGE.runs[0]} better`, {sort: "low"}], ["All, by id", {sort: "id"}],
] : [
  ["One of each kind", {sort: "type", each: true}], ["Where it fails", {sort: "low", changes: "one"}], ["Where it shines", {sort: "high", changes: "one"}],
  ["Several changes", {sort: "low", changes: "several"}], ["Nothing changed", {sort: "low", changes: "none"}], [`All ${NOUN}`, {sort: "order"}],
]).filter(([, view]) => PAGE.columns.length || !["low", "high", "most"].includes(view.sort));
const VIEW_CONTROLS = {changes: "", grade: "", sort: "order", type: "", kind: "", text: "", low: "", high: ""};
function applyView(view) {
  for (const [name, value] of Object.entries({...VIEW_CONTROLS, ...view})) if (name !== "each") field(name).value = value;
  each = Boolean(view.each);
  refresh();
}
function markView() {
  const state = view => Object.entries({...VIEW_CONTROLS, ...view}).every(([name, value]) => name === "each" || field(name).value === value) && each === Boolean(view.each);
  [...find("views").children].forEach((chip, place) => chip.setAttribute("aria-pressed", state(VIEWS[place][1])));
}

function fill(name, options, keep = options.length > 1) {
  field(name).replaceChildren(...options.map(([value, text]) => make("option", {value, textContent: text})));
  field(name).closest("label").hidden = !keep;
}
const asOptions = names => names.map((name, place) => [String(place), name]);
function setUp() {
  const has = group => PAIRS.some(group);
  fill("dataset", [["", "all"], ...PAGE.datasets.map(name => [name, name])], PAGE.datasets.length > 1);
  fill("protocol", [["", "first of each dataset"], ...asOptions(PAGE.protocols)], PAGE.protocols.length > 1);
  fill("type", [["", "any"], ...PAGE.types.map(type => [type, type])], PAGE.types.length > 1);
  fill("kind", [["", "any"], ...PAGE.kinds.map(kind => [kind, kind])], PAGE.kinds.length > 1);
  fill("changes", [["", "any number"], ["one", "one"], ["several", "several"], ["none", "none"]].filter(([key]) => has(GROUPS[key])));
  fill("grade", TWO ? [["", "any"], ["differ", "captions differ"], ...(PAGE.graded ? [["gained", `all right in ${PAGE.runs[1]} only`], ["lost", `all right in ${PAGE.runs[0]} only`]] : [])]
    : [["", "any"], ["right", "all right"], ["type", "type or form right"], ["wrong", "not all right"]].filter(([key]) => key !== "type" || PAIRS.some(pair => pair.captions[0].grade === 1)), TWO || PAGE.graded);
  fill("column", asOptions(PAGE.columns));
  fill("sort", [...(PAGE.columns.length ? [["low", `lowest ${MEASURE} first`], ["high", `highest ${MEASURE} first`]] : []), ...(TWO ? [["most", "largest difference first"]] : []), ["id", "id"], ["type", "type"], ["order", "order of the records"]]);
  field("low").closest("label").hidden = !PAGE.columns.length;
  for (const [text, view] of VIEWS) find("views").append(make("button", {type: "button", textContent: text, onclick: () => applyView(view)}));
  [...find("views").children].forEach((chip, place) => { const {changes: group} = VIEWS[place][1]; chip.hidden = Boolean(group) && !has(GROUPS[group]) || Boolean(VIEWS[place][1].each) && SORTS < 2; });
  if (!PAGE.saliency) find("heat-label").remove();
}

// ---- cards ----
function refresh() {
  find("range-name").textContent = `${PAGE.columns[field("column").value] || "score"}${TWO ? " difference" : ""} from, to`;
  shown = matchingPairs();
  drawn = 0;
  cards.replaceChildren();
  find("count").textContent = shown.length === PAIRS.length ? `${PAIRS.length} ${NOUN}` : `${shown.length} of ${PAIRS.length} ${NOUN}`;
  find("clear").hidden = shown.length === PAIRS.length;
  markView();
  drawMore();
}
function drawMore() {
  const end = Math.min(drawn + (drawn ? BATCH : FIRST), shown.length);
  cards.append(...shown.slice(drawn, end).map((pair, offset) => card(pair, drawn + offset)));
  drawn = end;
  find("more").hidden = drawn >= shown.length;
}
function picture(src, caption, alt) {
  return make("figure", {}, make("img", {src, alt, loading: "lazy", decoding: "async"}), make("figcaption", {textContent: caption}));
}
function captionOf(pair, run) {
  const caption = pair.captions[run], parts = [];
  const name = TWO ? `${PAGE.runs[run]}${PAGE.columns.length ? ", " + times100(scoreOf(pair, run)) : ""}` : pair.question === null ? "prediction" : "answer";
  parts.push(make("p", {className: "label small quiet", textContent: name}));
  for (const [text, marks] of caption.clauses) {
    parts.push(make("p", {className: "prediction", textContent: text || "(empty)"}));
    if (marks.length) parts.push(make("ul", {className: "marks"}, ...marks.map(([what, right]) => make("li", {className: right ? "right" : "wrong", textContent: what}))));
  }
  if (caption.missed) parts.push(make("ul", {className: "marks"}, make("li", {className: "wrong", textContent: `${caption.missed} change${caption.missed > 1 ? "s" : ""} not named`})));
  return parts;
}
function dialogueOf(pair, most = Infinity) {  // the latest turns before the question, and the question
  if (pair.question === null) return [];
  const turns = pair.history.slice(Math.max(0, pair.history.length - most)), left = pair.history.length - turns.length, parts = [];
  if (left) parts.push(make("p", {className: "turn quiet", textContent: `${left} earlier turn${left > 1 ? "s" : ""}`}));
  for (const [question, answer] of turns) parts.push(make("p", {className: "turn quiet", textContent: question}), make("p", {className: "turn told quiet", textContent: answer}));
  return [make("div", {className: "asked"}, ...parts, make("p", {className: "turn", textContent: pair.question}))];
}
function scoreText(pair) {
  const name = PAGE.columns[field("column").value];
  return name ? `${name} ${TWO ? signed(measure(pair)) : times100(measure(pair))}` : "";
}
function card(pair, place) {
  const element = make("article", {className: "card", tabIndex: 0, onclick: () => open(place)});
  element.dataset.id = pair.id;
  element.setAttribute("aria-label", `${title(pair)}: open`);
  element.append(make("header", {}, make("b", {textContent: title(pair)}), make("span", {textContent: scoreText(pair)})));
  if (pair.images) {
    const [before, after] = pair.images, heat = pair.outlined;
    if (pair.images.length === 2) element.append(make("div", {className: heat ? "trio" : "trio two"}, picture(before, "before", "before"), picture(after, "after", "after"),
      heat ? picture(heat, "saliency map", "after, with the outlines of its saliency map") : null));
    else if (pair.images.length === 1) element.append(make("div", {className: "trio two"}, picture(before, "image", "image"), heat ? picture(heat, "saliency map", "image, with the outlines of its saliency map") : null));
  } else element.append(forbidden(pair));
  element.append(...dialogueOf(pair, 2));
  PAGE.runs.forEach((_, run) => element.append(...captionOf(pair, run)));
  const others = pair.references.length - 1;
  element.append(make("div", {className: "truth"}, make("p", {className: "small", textContent: others ? `closest of ${pair.references.length} references` : "reference"}), make("q", {textContent: pair.references[0] || "(empty)"})));
  element.append(make("p", {className: "id", textContent: pair.id}));
  return element;
}
const forbidden = pair => make("p", {className: "small quiet", textContent: `Images not shown: the licence of ${pair.dataset} does not allow it.`});

// ---- one pair ----
function open(place) {
  if (place < 0 || place >= shown.length) return;
  opened = place;
  const pair = shown[place];
  find("viewer-title").textContent = title(pair);
  find("viewer-place").textContent = `${place + 1} of ${shown.length}`;
  find("previous").disabled = place === 0;
  find("next").disabled = place === shown.length - 1;
  const count = pair.images ? pair.images.length : 0;
  find("look").hidden = count === 0;
  find("slide").hidden = find("slide-keys").hidden = count !== 2;
  find("single").hidden = count !== 1;
  if (count === 2) {
    find("slide-before").src = pair.images[0];
    slide(50);
  }
  if (count) showLast();
  const others = pair.references.length > 1 ? "references, the closest first" : "reference";
  find("words").replaceChildren(...(pair.images ? [] : [forbidden(pair)]), ...dialogueOf(pair), ...PAGE.runs.flatMap((_, run) => captionOf(pair, run)),
    make("div", {className: "truth"}, make("p", {className: "small", textContent: others}), ...pair.references.map(text => make("q", {textContent: text || "(empty)"}))),
    scoreTable(pair), make("p", {className: "id", textContent: pair.id}));
  if (!viewer.open) viewer.showModal();
  viewer.scrollTop = 0;
  if (count === 2) find("slider").focus();
}
function scoreTable(pair) {
  const columns = PAGE.columns.filter((_, place) => PAGE.runs.some((_, run) => scoreOf(pair, run, place) !== null));
  if (!columns.length) return make("span");
  const cell = (tag, text) => make(tag, {textContent: text});
  const head = make("tr", {}, cell("th", ""), ...columns.map(name => cell("th", name)));
  const rows = Object.keys(pair.scores).flatMap(protocol => PAGE.runs.map((run, place) => make("tr", {},
    cell("th", [TWO ? run : "", PAGE.protocols[protocol]].filter(Boolean).join(", ")),
    ...columns.map(name => cell("td", times100(pair.scores[protocol][place][PAGE.columns.indexOf(name)]))))));
  return make("div", {className: "scroll"}, make("table", {className: "narrow"}, make("thead", {}, head), make("tbody", {}, ...rows)));
}
function showLast() {  // the image after or the only image, with or without the outlines of its saliency map
  const {images, outlined} = shown[opened], heatBox = find("heat");
  if (heatBox) find("heat-label").hidden = !outlined;
  find(images.length === 2 ? "slide-after" : "single").src = heatBox && heatBox.checked && outlined ? outlined : images[images.length - 1];
}
const isShown = count => viewer.open && (shown[opened].images || []).length >= count;
function slide(value) {
  find("slider").value = value;
  find("slide").style.setProperty("--x", `${100 - value}%`);
}
const step = by => { if (opened + by >= 0 && opened + by < shown.length) open(opened + by); };

// ---- events ----
controls.addEventListener("input", event => { each = each && ["dataset", "protocol", "column", "sort"].includes(event.target.name); refresh(); });
controls.addEventListener("submit", event => event.preventDefault());
find("clear").onclick = () => { field("dataset").value = field("protocol").value = ""; applyView({sort: field("sort").value}); };
find("more").firstElementChild.onclick = drawMore;
// if sections follow the gallery, only the button adds pairs; otherwise nobody could scroll to the sections
if ("IntersectionObserver" in window && !PAGE.first) new IntersectionObserver(seen => { if (seen.some(entry => entry.isIntersecting) && drawn) drawMore(); }, {rootMargin: "800px"}).observe(find("more"));
find("previous").onclick = () => step(-1);
find("next").onclick = () => step(1);
find("close").onclick = () => viewer.close();
find("slider").oninput = event => slide(Number(event.target.value));
if (find("heat")) find("heat").onchange = showLast;
viewer.addEventListener("click", event => { if (event.target === viewer) viewer.close(); });
viewer.addEventListener("close", () => {
  while (drawn <= opened) drawMore();
  cards.children[opened].focus();
});
document.addEventListener("click", event => {
  const link = event.target.closest("[data-type], [data-kind]"), sort = PAGE.columns.length ? "low" : "order";
  if (link && link.dataset.type) applyView({type: link.dataset.type, changes: "one", sort});
  if (link && link.dataset.kind) applyView({kind: link.dataset.kind, sort});
  const button = event.target.closest("[data-copy]");
  if (button) copy(button, button.parentElement.nextElementSibling);
});
function copy(button, source) {  // if the clipboard cannot be used, the text stays selected
  const name = button.textContent, done = text => { button.textContent = text; setTimeout(() => { button.textContent = name; }, 1500); };
  getSelection().selectAllChildren(source);
  const byHand = () => done(document.execCommand("copy") ? "copied" : "selected: press Ctrl+C");
  if (navigator.clipboard) navigator.clipboard.writeText(source.textContent).then(() => done("copied"), byHand);
  else byHand();
}
document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const direction = {ArrowLeft: -1, ArrowRight: 1}[event.key];
  if (viewer.open) {
    if (direction) { event.preventDefault(); step(direction); }
    else if (event.key === "s" && find("heat")) { find("heat").checked = !find("heat").checked; if (isShown(1)) showLast(); }
    else if ((event.key === "ArrowUp" || event.key === "ArrowDown") && isShown(2) && event.target !== find("slider")) {
      event.preventDefault(); slide(Number(find("slider").value) + (event.key === "ArrowUp" ? 1 : -1));
    }
    return;
  }
  if (event.target === field("text")) {
    if (event.key === "Escape") { event.preventDefault(); field("text").value = ""; field("text").blur(); refresh(); }
  } else if (event.key === "/" && !/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) {
    event.preventDefault(); field("text").focus(); find("gallery").scrollIntoView();
  } else if (event.target.classList?.contains("card")) {
    const place = [...cards.children].indexOf(event.target);
    if (event.key === "Enter") open(place);
    else if (direction) { event.preventDefault(); if (place + direction >= drawn) drawMore(); cards.children[place + direction]?.focus(); }
  }
});

// ---- tables and folded parts ----
function reveal() {  // opens a folded part if the link points into it
  const target = location.hash.length > 1 ? find(decodeURIComponent(location.hash.slice(1))) : null;
  for (let node = target; node; node = node.parentElement) if (node.tagName === "DETAILS") node.open = true;
  if (target) target.scrollIntoView();
}
function markCutTables() {  // shows a hint below tables that are wider than the window
  if (!("ResizeObserver" in window)) return;
  const widths = new ResizeObserver(entries => entries.forEach(({target}) => target.classList.toggle("cut", target.scrollWidth > target.clientWidth + 1)));
  document.querySelectorAll(".scroll").forEach(table => widths.observe(table));
}
addEventListener("hashchange", reveal);
// the gallery's script runs before the parser has read the sections below it
addEventListener("DOMContentLoaded", () => { markCutTables(); reveal(); });

setUp();
applyView(VIEWS[SORTS > 1 || TWO ? 0 : VIEWS.length - 1][1]);
})();
