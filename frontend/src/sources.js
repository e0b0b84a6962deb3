// Where a page reads from: the file that it lies in, or the server that shows it.

import { fromBase64, gunzip, unpack } from "./decode.js";

/** A page whose data is embedded in it. */
export class FileSource {
  constructor() {
    this.live = false;
    this.nodes = new Map();
    for (const node of document.querySelectorAll("script[data-chunk]")) this.nodes.set(node.dataset.chunk, node);
    this.kept = new Map();
  }

  static here() {
    return document.querySelector('script[data-chunk="page"]') !== null;
  }

  async page() {
    const content = await gunzip(fromBase64(this.nodes.get("page").textContent));
    return JSON.parse(new TextDecoder().decode(content));
  }

  chunk(id) {
    if (!this.kept.has(id)) {
      const node = this.nodes.get(id);
      const found = node
        ? gunzip(fromBase64(node.textContent)).then(unpack)
        : Promise.reject(new Error(`This page has no part ${id}.`));
      this.kept.set(id, found);
      if (this.kept.size > 40) this.kept.delete(this.kept.keys().next().value);
    }
    return this.kept.get(id);
  }
}

/** A page that a server on this machine makes while something writes to the folder. */
export class LiveSource {
  constructor(name) {
    this.live = true;
    this.name = name;
    this.events = null;
  }

  static async names() {
    return (await (await fetch("api/sources")).json()).sources;
  }

  address(what, query = {}) {
    return `api/${what}?${new URLSearchParams({ source: this.name, ...query })}`;
  }

  async page() {
    const answer = await fetch(this.address("page"));
    if (!answer.ok) throw new Error(await answer.text());
    return answer.json();
  }

  async chunk(id) {
    const answer = await fetch(this.address("chunk", { id }));
    if (!answer.ok) throw new Error(await answer.text());
    return unpack(await answer.arrayBuffer());
  }

  /** Call back with what the server tells, and with whether it can be reached. */
  listen(revision, told, state) {
    this.events?.close();
    this.events = new EventSource(this.address("events", { revision }));
    this.events.addEventListener("update", (event) => told(JSON.parse(event.data)));
    this.events.addEventListener("open", () => state(true));
    this.events.addEventListener("error", () => state(false));
  }

  close() {
    this.events?.close();
  }
}
