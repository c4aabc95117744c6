"use strict";
// A recorded generation in three dimensions: candidates of the draft above, the target's pass below, the text between.
// Each round has four steps: drafted, read by the target, judged, committed. All text is set as text, never as markup.
(() => {
  const STEPS = ["drafted", "read by the target", "judged", "committed"];
  const SVG = "http://www.w3.org/2000/svg";
  const ABOVE = 1.4, BELOW = -1.4, APART = 2.4, SIBLING = 0.9, SHOWN = 6, AWAY = 22; // AWAY: of the eye
  const still = matchMedia("(prefers-reduced-motion: reduce)");
  const clean = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥");
  const number = (value) => (value === null ? "–" : value && value < 0.001 ? value.toExponential(1) : value.toFixed(3));

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
    const places = [];
    let level = [-1];
    for (let depth = 1; level.length; depth += 1) { // children of a node lie side by side
      level = level.flatMap((parent) => [...drafts.keys()].filter((i) => drafts[i].parent === parent));
      level.forEach((i, place) => { places[i] = [depth, (place - (level.length - 1) / 2) * SIBLING]; });
    }
    return places;
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
      Object.assign(this, { frame: 2, row: 0, speed: 0, yaw: -0.3, pitch: 0.35, timer: null, moved: 1 });
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
      if (this.row < 0) made.createCaption().textContent = `row ${one.row + 1}`;
      for (const name of ["draft", "token", "hangs on", "q", "p", "p / q", "u", ""]) {
        const cell = document.createElement("th");
        cell.textContent = name;
        head.append(cell);
      }
      const body = made.createTBody();
      one.drafts.forEach((draft, i) => {
        const row = body.insertRow(), on = draft.parent < 0 ? "text" : draft.parent + 1;
        const read = this.step < 1 ? ["–", "–"] : [number(draft.p), number(draft.ratio)];
        const judged = this.step < 2 ? ["–", ""] : [number(draft.u), draft.state];
        const cells = [i + 1, clean(draft.text), on, number(draft.q), ...read, ...judged];
        for (const value of cells) row.insertCell().textContent = value;
      });
      return made;
    }

    draw() {
      const { clientWidth: width, clientHeight: height } = this.scene;
      if (!width) return;
      this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      const rows = this.shownRows(), things = this.planes(rows);
      rows.forEach((one, i) => this.row_(one, (i - (rows.length - 1) / 2) * APART, width < 600 ? 3 : SHOWN, things));
      const seen = new Map(); // point -> where it is seen, at scale 1
      for (const thing of things) {
        for (const point of thing.ends || [thing.at]) seen.set(point, this.seen(point));
        thing.far = Math.max(...(thing.ends || [thing.at]).map((point) => seen.get(point)[2]));
      }
      const [xs, ys] = [0, 1].map((axis) => [...seen.values()].map((place) => place[axis]));
      const [left, right, low, high] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
      const scale = Math.min((width - 70) / (right - left || 1), (height - 80) / (high - low || 1), 110);
      const project = (point) => {
        const [x, y, far] = seen.get(point);
        return [width / 2 + (x - (left + right) / 2) * scale, height / 2 - (y - (low + high) / 2) * scale, AWAY / (AWAY + far)];
      };
      const order = (thing) => (thing.plane ? 0 : thing.ends ? 1 : 2);
      things.sort((a, b) => order(a) - order(b) || b.far - a.far);
      this.svg.replaceChildren(...things.flatMap((thing) => this.shape(thing, project)));
    }

    planes(rows) { // the draft's above and the target's below
      if (!rows.length) return [];
      const long = 0.6 + Math.max(1, ...rows.map((one) => Math.max(0, ...placed(one.drafts).map(([depth]) => depth)) + 1));
      const side = Math.max(0.6, ...rows.flatMap((one) => placed(one.drafts).map(([, aside]) => Math.abs(aside) + 0.5)));
      const half = ((rows.length - 1) / 2) * APART + side;
      return [[ABOVE, "draft"], [BELOW, "target"]].map(([y, label]) => (
        { plane: label, ends: [[0.4, y, -half], [long, y, -half], [long, y, half], [0.4, y, half]] }));
    }

    seen([x, y, z]) { // turned about the origin, nearer is larger
      const [cy, sy, cp, sp] = [Math.cos(this.yaw), Math.sin(this.yaw), Math.cos(this.pitch), Math.sin(this.pitch)];
      const [a, c] = [x * cy + z * sy, -x * sy + z * cy];
      const far = -y * sp + c * cp, near = AWAY / (AWAY + far);
      return [a * near, (y * cp + c * sp) * near, far];
    }

    row_(one, z, most, things) { // what there is to draw of a row
      const before = this.text(one.row), committed = this.step === 3, fresh = committed ? taken(one).length : 0;
      const old = before.slice(0, before.length - fresh).slice(-most);
      old.forEach(([text, kind], i) => {
        const shape = kind === "accepted" ? "old" : kind, at = [0.8 * (i - old.length + 1), 0, z];
        things.push({ at, kind: shape, small: true, tint: kind, label: clean(text), dim: true, said: `“${clean(text)}”\n${kind}` });
      });
      if (!old.length) things.push({ at: [0, 0, z], kind: "cell", label: "prompt", dim: true, small: true });
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
          things.push({ at: where(i, BELOW), kind: "cell", tint: state, said: this.said(draft), size: 0.5 + draft.p });
        }
        things.push({ at: where(i, y), kind: state, tint: state, label: clean(draft.text), said: this.said(draft) });
      });
      if (one.last && this.step >= 2) {
        const y = committed ? BELOW * (1 - this.moved) : BELOW, kind = one.last.kind;
        things.push({ at: [depth + 1, y, z], kind, tint: kind, label: clean(one.last.text), said: `“${clean(one.last.text)}”\n${kind}`, below: true });
      }
    }

    said(draft) { // p is known once the target has read, u decides behind it
      const lines = [`“${clean(draft.text)}”`, `q ${number(draft.q)}`];
      if (this.step >= 1) lines.push(`p ${number(draft.p)}`, `p / q ${number(draft.ratio)}`);
      if (this.step >= 2) lines.push(`u ${number(draft.u)}`, draft.state);
      return lines.join("\n");
    }

    shape(thing, project) {
      const tint = `var(--${thing.tint === "drafted" || !thing.tint ? "dim" : thing.tint})`;
      if (thing.plane) {
        const corners = thing.ends.map(project), points = corners.map(([x, y]) => `${x},${y}`).join(" ");
        const [x, y] = corners[3];
        return [element("polygon", { points, fill: "var(--dim)", "fill-opacity": 0.08, stroke: "var(--line)" }),
          element("text", { x: x + 4, y: y - 4, class: "dim", "pointer-events": "none" }, thing.plane)];
      }
      if (thing.ends) {
        const [[x1, y1, near], [x2, y2]] = thing.ends.map(project);
        const dash = thing.tint === "unread" || thing.tint === "drafted" ? "3 4" : "none";
        return [element("line", { x1, y1, x2, y2, stroke: tint, "stroke-width": (thing.thin ? 1 : 2) * near, "stroke-dasharray": dash, opacity: thing.thin ? 0.5 : 0.9 })];
      }
      const [x, y, near] = project(thing.at), r = (thing.small ? 4 : 7) * near * (thing.size || 1);
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
