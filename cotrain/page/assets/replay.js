"use strict";
// A recorded generation in three dimensions: candidates of the draft above, the target's pass below, the text between.
// Each round has four steps: drafted, read by the target, judged, committed. All text is set as text, never as markup.
(() => {
  const STEPS = ["drafted", "read by the target", "judged", "committed"];
  const SVG = "http://www.w3.org/2000/svg";
  const ABOVE = 1.5, BELOW = -1.5, APART = 2.2, SIBLING = 0.8, SHOWN = 6;
  const still = matchMedia("(prefers-reduced-motion: reduce)");
  const clean = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥");
  const number = (value) => (value === null ? "–" : value.toFixed(3));

  function element(name, attributes, text) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function span(text, kind) {
    const made = document.createElement("span");
    made.className = kind;
    made.textContent = text;
    return made;
  }

  function path(kind, r) { // of a shape about the origin
    if (kind === "refused") return `M${-r},${-r}L${r},${r}M${r},${-r}L${-r},${r}`;
    if (kind === "corrected") return `M0,${-1.3 * r}L${1.3 * r},0L0,${1.3 * r}L${-1.3 * r},0Z`;
    if (kind === "bonus") {
      const points = [...Array(10).keys()].map((i) => {
        const at = (Math.PI * i) / 5 - Math.PI / 2, far = i % 2 ? 0.6 * r : 1.4 * r;
        return `${far * Math.cos(at)},${far * Math.sin(at)}`;
      });
      return `M${points.join("L")}Z`;
    }
    if (kind === "cell") return `M${-r},${-r}H${r}V${r}H${-r}Z`;
    return `M${-r},0A${r},${r} 0 1 0 ${r},0A${r},${r} 0 1 0 ${-r},0Z`;
  }

  function taken(one) { // tokens that a row's part of a round added, with their kinds
    const kept = one.drafts.filter((draft) => draft.state === "accepted").map((draft) => [draft.text, "accepted"]);
    return one.last ? [...kept, [one.last.text, one.last.kind]] : kept;
  }

  function placed(drafts) { // depth and sideways place of every node of a tree
    const depth = drafts.map(() => 0), count = new Map();
    drafts.forEach((draft, i) => { depth[i] = draft.parent < 0 ? 1 : depth[draft.parent] + 1; });
    depth.forEach((d) => count.set(d, (count.get(d) || 0) + 1));
    const seen = new Map();
    return depth.map((d) => {
      const place = seen.get(d) || 0;
      seen.set(d, place + 1);
      return [d, (place - (count.get(d) - 1) / 2) * SIBLING];
    });
  }

  class Player {
    constructor(box) {
      this.box = box;
      this.data = JSON.parse(document.getElementById(box.dataset.replay).textContent);
      this.scene = box.querySelector(".scene");
      this.svg = element("svg", { "aria-hidden": "true" });
      this.tip = document.createElement("div");
      this.tip.className = "tip";
      this.tip.hidden = true;
      this.scene.append(this.svg, this.tip);
      Object.assign(this, { frame: 2, row: 0, speed: 0, yaw: -0.35, pitch: 0.3, timer: null, moved: 1 });
      box.addEventListener("click", (event) => this.clicked(event.target.dataset.do));
      box.addEventListener("input", (event) => this.chosen(event.target));
      this.scene.addEventListener("keydown", (event) => this.pressed(event));
      this.scene.addEventListener("pointerdown", (event) => this.dragged(event));
      this.scene.addEventListener("pointermove", (event) => this.hovered(event));
      this.scene.addEventListener("pointerleave", () => { this.tip.hidden = true; });
      new ResizeObserver(() => this.draw()).observe(this.scene);
      this.show();
    }

    get round() { return Math.floor(this.frame / STEPS.length); }
    get step() { return this.frame % STEPS.length; }
    get last() { return this.data.rounds.length * STEPS.length - 1; }
    control(name) { return this.box.querySelector(`[data-do="${name}"]`); }

    clicked(what) {
      if (what === "play") this.play(this.timer === null);
      if (what === "back") this.go(this.frame - 1);
      if (what === "forward") this.go(this.frame + 1);
    }

    chosen(control) {
      const value = Number(control.value);
      if (control.dataset.do === "row") this.row = value;
      if (control.dataset.do === "round") this.frame = value * STEPS.length + 2;
      if (control.dataset.do === "speed") this.pace(value);
      this.show();
    }

    pressed(event) {
      const turn = { ArrowLeft: [-0.15, 0], ArrowRight: [0.15, 0], ArrowUp: [0, 0.15], ArrowDown: [0, -0.15] }[event.key];
      if (event.shiftKey && turn) this.turn(...turn);
      else if (event.key === " ") this.play(this.timer === null);
      else if (event.key === "ArrowLeft") this.go(this.frame - 1);
      else if (event.key === "ArrowRight") this.go(this.frame + 1);
      else if (event.key === "ArrowUp" || event.key === "ArrowDown") this.other(event.key === "ArrowUp" ? -1 : 1);
      else if (event.key === "+" || event.key === "-") this.pace(this.speed + (event.key === "+" ? 1 : -1));
      else return;
      event.preventDefault();
    }

    play(on) {
      if (this.timer !== null) clearInterval(this.timer);
      this.timer = on ? setInterval(() => this.go(this.frame + 1), 900 / 2 ** this.speed) : null;
      this.control("play").textContent = on ? "❚❚ pause" : "▶ play";
      if (on && this.frame >= this.last) this.frame = 0;
    }

    pace(value) {
      this.speed = Math.max(-2, Math.min(3, value));
      this.control("speed").value = this.speed;
      if (this.timer !== null) this.play(true);
    }

    other(by) {
      const rows = this.data.rows.length;
      this.row = ((this.row + 1 + by + rows + 1) % (rows + 1)) - 1;
      this.control("row").value = this.row;
      this.show();
    }

    turn(yaw, pitch) {
      this.yaw += yaw;
      this.pitch = Math.max(-1.3, Math.min(1.3, this.pitch + pitch));
      this.draw();
    }

    dragged(start) {
      let [x, y] = [start.clientX, start.clientY];
      const move = (event) => {
        this.turn((event.clientX - x) / 200, (event.clientY - y) / 200);
        [x, y] = [event.clientX, event.clientY];
      };
      addEventListener("pointermove", move);
      addEventListener("pointerup", () => removeEventListener("pointermove", move), { once: true });
    }

    hovered(event) {
      const said = event.target.dataset ? event.target.dataset.said : undefined;
      this.tip.hidden = !said;
      if (!said) return;
      this.tip.textContent = said;
      const box = this.scene.getBoundingClientRect();
      this.tip.style.left = `${Math.min(event.clientX - box.left + 12, box.width - 190)}px`;
      this.tip.style.top = `${Math.min(event.clientY - box.top + 12, box.height - 110)}px`;
    }

    go(frame) {
      if (frame > this.last && this.timer !== null) this.play(false);
      const next = Math.max(0, Math.min(this.last, frame));
      if (next === this.frame) return;
      this.frame = next;
      this.show();
      this.sink();
    }

    sink() { // accepted candidates move to the text in the last step of a round
      if (this.step !== 3 || still.matches) return;
      const start = performance.now(), long = Math.min(500, 600 / 2 ** this.speed), frame = this.frame;
      const tick = (now) => {
        if (this.frame !== frame) return;
        this.moved = Math.min(1, (now - start) / long);
        this.draw();
        if (this.moved < 1) requestAnimationFrame(tick);
      };
      this.moved = 0;
      requestAnimationFrame(tick);
    }

    shownRows() {
      const rows = this.data.rounds[this.round];
      return this.row < 0 ? rows : rows.filter((one) => one.row === this.row);
    }

    text(row) { // tokens of a row before this round, or behind it once it is committed
      const until = this.step === 3 ? this.round + 1 : this.round;
      const all = this.data.rounds.slice(0, until).flatMap((rows) => rows.filter((one) => one.row === row));
      return all.flatMap(taken);
    }

    show() {
      this.moved = 1;
      this.control("round").value = this.round;
      this.tip.hidden = true;
      this.draw();
      this.say();
    }

    say() {
      const rows = this.shownRows();
      const head = `Round ${this.round + 1} of ${this.data.rounds.length}, ${STEPS[this.step]}. `;
      this.box.querySelector(".said").textContent = head + (rows.map((one) => this.line(one)).join(" ") ||
        `Row ${this.row + 1} is not decoded in this round: it has ended, or waits.`);
      const text = this.box.querySelector(".text"), table = this.box.querySelector(".drafts");
      text.replaceChildren();
      for (const row of this.row < 0 ? this.data.rows.keys() : [this.row]) {
        const parts = this.text(row).map(([token, kind]) => span(token, kind));
        text.append(span(this.data.rows[row].prompt, "prompt"), ...parts, document.createTextNode("\n"));
      }
      text.scrollTop = text.scrollHeight;
      table.replaceChildren(...rows.map((one) => this.table(one)));
    }

    line(one) {
      const kept = one.drafts.filter((draft) => draft.state === "accepted").length;
      const who = this.row < 0 ? `Row ${one.row + 1}: ` : "";
      if (this.step < 2) return `${who}${one.drafts.length} drafted.`;
      const no = one.drafts.find((draft) => draft.state === "refused");
      const why = no && no.u !== null ? ` (u ${number(no.u)}, p / q ${number(no.ratio)})` : "";
      const refused = no ? `, “${clean(no.text)}” refused${why}` : "";
      const last = one.last ? `; ${one.last.kind}: “${clean(one.last.text)}”` : "";
      return `${who}${kept} of ${one.drafts.length} accepted${refused}${last}.`;
    }

    table(one) {
      const made = document.createElement("table"), head = made.createTHead().insertRow();
      for (const name of ["draft", "token", "hangs on", "q", "p", "p / q", "u", ""]) {
        const cell = document.createElement("th");
        cell.textContent = name;
        head.append(cell);
      }
      const body = made.createTBody();
      one.drafts.forEach((draft, i) => {
        const row = body.insertRow(), on = draft.parent < 0 ? "text" : draft.parent + 1;
        const seen = this.step < 2 ? ["–", "–", "–", ""] : [number(draft.p), number(draft.ratio), number(draft.u), draft.state];
        const cells = [i + 1, clean(draft.text), on, number(draft.q), ...seen];
        for (const value of cells) row.insertCell().textContent = value;
      });
      return made;
    }

    draw() {
      const { clientWidth: width, clientHeight: height } = this.scene;
      if (!width) return;
      this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      const rows = this.shownRows(), things = [];
      rows.forEach((one, i) => this.row_(one, (i - (rows.length - 1) / 2) * APART * 1.4, things));
      const points = things.flatMap((thing) => thing.ends || [thing.at]);
      const bounds = [0, 2].map((axis) => points.map((point) => point[axis]));
      const middle = bounds.map((values) => (Math.min(...values, 0) + Math.max(...values, 0)) / 2);
      const turned = (point) => this.turned(point, middle);
      const scale = this.fit(points.map(turned), width, height);
      for (const thing of things) thing.far = Math.max(...(thing.ends || [thing.at]).map((point) => turned(point)[2]));
      things.sort((a, b) => b.far - a.far || (a.ends ? -1 : 1));
      const project = (point) => {
        const [x, y, z] = turned(point), near = 12 / (12 + z);
        return [width / 2 + x * scale * near, height / 2 - y * scale * near, near];
      };
      this.svg.replaceChildren(...things.flatMap((thing) => this.shape(thing, project)));
    }

    turned([x, y, z], [mx, mz]) {
      const [cy, sy, cp, sp] = [Math.cos(this.yaw), Math.sin(this.yaw), Math.cos(this.pitch), Math.sin(this.pitch)];
      const [a, c] = [(x - mx) * cy + (z - mz) * sy, -(x - mx) * sy + (z - mz) * cy];
      return [a, y * cp + c * sp, -y * sp + c * cp];
    }

    fit(points, width, height) {
      const wide = Math.max(1, ...points.map(([x, , z]) => Math.abs(x) * 12 / (12 + z)));
      const high = Math.max(1, ...points.map(([, y, z]) => Math.abs(y) * 12 / (12 + z)));
      return Math.min((width / 2 - 45) / wide, (height / 2 - 30) / high, 110);
    }

    row_(one, z, things) { // what there is to draw of a row
      const before = this.text(one.row), committed = this.step === 3, fresh = committed ? taken(one).length : 0;
      const old = before.slice(0, before.length - fresh).slice(-SHOWN);
      old.forEach(([text, kind], i) => {
        things.push({ at: [i - old.length, 0, z], kind: "old", tint: kind, label: clean(text), dim: true });
      });
      things.push({ at: [0, 0, z], kind: "cell", label: old.length ? "" : "prompt", small: true, said: "the text so far" });
      const place = placed(one.drafts);
      const where = (i, y) => [place[i][0], y, z + place[i][1]];
      let depth = 0;
      one.drafts.forEach((draft, i) => {
        const judged = this.step >= 2, state = judged ? draft.state : "drafted";
        if (draft.state === "accepted") depth = Math.max(depth, place[i][0]);
        const y = committed && state === "accepted" ? ABOVE * (1 - this.moved) : ABOVE;
        const from = draft.parent < 0 ? [0, 0, z] : where(draft.parent, committed && one.drafts[draft.parent].state === "accepted" ? ABOVE * (1 - this.moved) : ABOVE);
        things.push({ ends: [from, where(i, y)], tint: state });
        if (this.step >= 1) {
          things.push({ ends: [where(i, y), where(i, BELOW)], tint: state, thin: true });
          things.push({ at: where(i, BELOW), kind: "cell", tint: state, said: this.said(draft, true), size: 0.5 + draft.p });
        }
        things.push({ at: where(i, y), kind: state, tint: state, label: clean(draft.text), said: this.said(draft, judged) });
      });
      if (one.last && this.step >= 2) {
        const y = committed ? BELOW * (1 - this.moved) : BELOW, kind = one.last.kind;
        things.push({ at: [depth + 1, y, z], kind, tint: kind, label: clean(one.last.text), said: `“${clean(one.last.text)}”\n${kind}`, below: true });
      }
    }

    said(draft, judged) {
      const lines = [`“${clean(draft.text)}”`, `q ${number(draft.q)}`];
      if (judged) lines.push(`p ${number(draft.p)}`, `p / q ${number(draft.ratio)}`, `u ${number(draft.u)}`, draft.state);
      return lines.join("\n");
    }

    shape(thing, project) {
      const tint = `var(--${thing.tint === "drafted" || !thing.tint ? "dim" : thing.tint})`;
      if (thing.ends) {
        const [[x1, y1, near], [x2, y2]] = thing.ends.map(project);
        const dash = thing.tint === "unread" || thing.tint === "drafted" ? "3 4" : "none";
        return [element("line", { x1, y1, x2, y2, stroke: tint, "stroke-width": (thing.thin ? 1 : 2) * near, "stroke-dasharray": dash, opacity: thing.thin ? 0.5 : 0.9 })];
      }
      const [x, y, near] = project(thing.at), r = (thing.kind === "old" || thing.small ? 4 : 7) * near * (thing.size || 1);
      const full = ["accepted", "corrected", "bonus", "old", "cell"].includes(thing.kind);
      const made = element("path", { d: path(thing.kind, r), transform: `translate(${x},${y})`, fill: full ? tint : "var(--panel)",
        stroke: tint, "stroke-width": thing.kind === "refused" ? 4 : 2, "fill-opacity": thing.kind === "cell" ? 0.35 : 1 });
      if (thing.kind === "unread" || thing.kind === "drafted") made.setAttribute("stroke-dasharray", "2 2");
      if (thing.said) { made.dataset.said = thing.said; made.append(element("title", {}, thing.said)); }
      made.setAttribute("class", `node ${thing.kind}`);
      if (!thing.label) return [made];
      const label = thing.label.length > 14 ? `${thing.label.slice(0, 13)}…` : thing.label;
      const words = element("text", { x, y: y + (thing.below || thing.dim ? 20 : -12) * near, "text-anchor": "middle", class: thing.dim ? "dim" : "", "font-size": 13 * near, "pointer-events": "none" }, label);
      return [made, words];
    }
  }

  document.querySelectorAll("[data-replay]").forEach((box) => { box.player = new Player(box); });
})();
