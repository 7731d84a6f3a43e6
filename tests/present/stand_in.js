// Runs a page without a browser, on elements that only remember what was put on them:
//
//   node stand_in.js page.html
//
// prints `drawn`, the elements after the script ran, and `fired`: then every listener is called
// once. NaN, undefined and the like, put anywhere on the page, stop it.
"use strict";
const {readFileSync} = require("node:fs"), {runInNewContext} = require("node:vm");

function checked(value) {
  const text = String(value);
  if (/\b(NaN|undefined|null|Infinity|object Object)\b/.test(text)) throw new Error(`on the page: ${text}`);
  return text;
}

class Element {
  constructor(tag) {
    const style = new Proxy({}, {set: (at, key, value) => { at[key] = checked(value); return true; }});
    Object.assign(this, {tag, style, attributes: {}, nodes: [], listeners: [], value: "", parent: null, clientWidth: 600});
  }
  setAttribute(key, value) { this.attributes[key] = checked(value); if (key === "value") this.value = value; }
  get className() { return this.attributes.class ?? ""; }
  set className(text) { this.setAttribute("class", text); }
  get classList() {
    const have = new Set(this.className.split(" ").filter(Boolean)), keep = () => { this.className = [...have].join(" "); };
    return {add: one => { have.add(one); keep(); }, remove: one => { have.delete(one); keep(); }};
  }
  get dataset() { return Object.fromEntries(Object.entries(this.attributes).filter(([key]) => key.startsWith("data-")).map(([key, value]) => [key.slice(5), value])); }
  get textContent() { return this.nodes.map(node => node.textContent ?? node).join(""); }
  set textContent(text) { this.replaceChildren(text); }
  get children() { return this.nodes.filter(node => node instanceof Element); }
  append(...nodes) {
    for (const node of nodes) {
      if (node instanceof Element) { node.remove(); node.parent = this; }
      this.nodes.push(node instanceof Element ? node : checked(node));
    }
  }
  replaceChildren(...nodes) { for (const child of this.children) child.parent = null; this.nodes = []; this.append(...nodes); }
  remove() { if (this.parent) this.parent.nodes = this.parent.nodes.filter(node => node !== this); this.parent = null; }
  *inside() { for (const child of this.children) { yield child; yield* child.inside(); } }
  querySelectorAll(selector) {  // .class, [attribute] or tag
    const name = selector.replace(/[.[\]]/g, "");
    return [...this.inside()].filter(one => selector[0] === "." ? one.className.split(" ").includes(name) : selector[0] === "[" ? name in one.attributes : one.tag === name);
  }
  querySelector(selector) { return this.querySelectorAll(selector)[0] ?? null; }
  get tHead() { return this.querySelector("thead"); }
  get tBodies() { return this.querySelectorAll("tbody"); }
  get cells() { return this.children; }
  addEventListener(kind, call) { this.listeners.push([kind, call]); }
  getBoundingClientRect() { return {left: 0, top: 0}; }
  setPointerCapture() {}
  get attached() { return this === body || !!this.parent?.attached; }
}

const [, markup, script] = /<body>(.*)<script>(.*)<\/script>/s.exec(readFileSync(process.argv[2], "utf8"));
const body = new Element("body"), open = [body];
for (const [, end, tag, attributes, text] of markup.matchAll(/<(\/?)(\w+)([^>]*)>([^<]*)/g)) {
  if (end) open.pop();
  else {
    const element = new Element(tag);
    for (const [, key, value] of attributes.matchAll(/([\w-]+)(?:="([^"]*)")?/g)) element.setAttribute(key, value ?? "");
    open.at(-1).append(element);
    if (tag !== "input") open.push(element);
  }
  if (text.trim()) open.at(-1).append(text);
}
const byId = id => [...body.inside()].find(one => one.attributes.id === id) ?? null;
const document = {
  getElementById: byId, querySelectorAll: selector => body.querySelectorAll(selector),
  createElement: tag => new Element(tag), createElementNS: (_, tag) => new Element(tag),
};
runInNewContext(script, {document, addEventListener: (kind, call) => body.addEventListener(kind, call)});

const drawn = [...body.inside()].map(one => ({tag: one.tag, in: one.parent.attributes.id, text: one.textContent, ...one.attributes}));
const fired = [];
const listeners = [body, ...body.inside()].flatMap(element => element.listeners.map(([kind, call]) => [element, kind, call]));
listeners.sort((a, b) => (b[1] === "mouseenter") - (a[1] === "mouseenter"));  // others draw anew, or pin
for (const [element, kind, call] of listeners) {
  if (!element.attached) continue;  // an earlier call drew anew
  if (kind === "change") element.checked = true;
  const target = kind === "pointerover" ? element.querySelector(".device") : element;
  call({target, clientX: 320, clientY: 90, button: 0, pointerType: "mouse", pointerId: 1, key: "Enter", preventDefault() {}});
  fired.push({kind, id: element.attributes["data-id"], told: byId("told")?.textContent});
}
console.log(JSON.stringify({drawn, fired}));
