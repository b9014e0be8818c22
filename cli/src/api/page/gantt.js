// The lanes' pictures: what each stage worked at in the last seconds, and why it did not. Work stands tall with the
// number of its group, idle time lies low with the sign of its cause: neither needs its colour.

/** Seconds that are kept, and how far behind now the right edge is: what is on its way has come by then. */
const KEPT = 10;
const BEHIND = 0.8;
const FRAME_MS = 50;
const IDLE = 0.38;
const GROUPS = 8;
/** Parts of the axis. */
export const TICKS = 4;
/** Pictures of one stage that are drawn at most; beyond these the narrow ones go first. */
const DRAWN_MAX = 4000;

/** Causes of idle time, in the order of reports: name as the server has it, sign, name for people, meaning. */
export const CAUSES = [
  ["fill_drain", "·", "fill/drain", "before its first micro-batch, or after its last"],
  ["upstream", "u", "upstream", "another stage, or the head, was at work and set the pace"],
  ["hop", "h", "hop", "a micro-batch was on a link that could have been computed"],
  ["back_pressure", "b", "back-pressure", "the hop did not take its result: what is downstream is behind"],
  ["starved", "s", "starved", "nothing was asked for, or fewer micro-batches were in the pipe than it has stages"],
  ["kv_wait", "k", "KV wait", "starved, while requests waited that found no free pages"],
  ["overhead", "o", "overhead", "its own work around the device’s"],
  ["outage", "!", "outage", "a stage was lost, and there was no pipeline"],
  ["unattributed", "?", "unattributed", "the trace does not tell"],
];
const SIGNS = Object.fromEntries(CAUSES.map(([name, sign]) => [name, sign]));

const still = matchMedia("(prefers-reduced-motion: reduce)");

export class Gantt {
  /** Per stage: `{spans, idle}`, arrays of what the server sends, times in microseconds. */
  lanes = [];
  canvases = [];
  colours = {};
  /** Microseconds of the pipeline's clock, less those of this page's. */
  offset = null;
  paused = false;
  drawn = 0;
  /** Seconds from the left edge to the right. */
  shown = 2;

  constructor() {
    addEventListener("themechange", () => this.restyle());
    addEventListener("resize", () => this.draw(true));
    document.addEventListener("visibilitychange", () => this.schedule());
    this.restyle();
  }

  /** Begins anew, with a canvas for each stage. */
  reset(canvases) {
    this.canvases = canvases;
    this.lanes = canvases.map(() => ({ spans: [], idle: [] }));
    this.offset = null;
    this.draw(true);
  }

  /** What happened lately replaces what was known of that time. */
  tick(event) {
    const offset = event.now - performance.now() * 1e3;
    // The quickest way from the server tells the time best; clocks may drift, so it is forgotten slowly.
    this.offset = this.offset === null ? offset : Math.max(offset, this.offset - 2e3);
    const oldest = event.now - (KEPT + 2 * BEHIND + 1) * 1e6;
    event.stages.forEach((stage, index) => {
      const lane = this.lanes[index];
      if (!lane) return;
      lane.spans = lane.spans.filter((span) => span[1] > oldest && span[1] <= event.from).concat(stage.spans);
      const before = lane.idle.filter((idle) => idle[1] > oldest && idle[0] < event.from);
      for (const idle of before) idle[1] = Math.min(idle[1], event.from);
      lane.idle = before.concat(stage.idle);
    });
    this.schedule();
  }

  restyle() {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(name).trim();
    this.colours = { track: read("--tint"), line: read("--line"), edge: read("--edge"), on: read("--on-group"), sign: read("--on-cause"), font: read("--mono") };
    for (let group = 0; group < GROUPS; group++) this.colours[`g${group}`] = read(`--g${group}`);
    for (const [cause] of CAUSES) {
      this.colours[cause] = read(`--c-${cause}`);
      this.colours[`${cause}-sign`] = read(`--s-${cause}`) || this.colours.sign;
    }
    this.draw(true);
  }

  pause(paused) {
    this.paused = paused;
    this.schedule();
  }

  zoom(seconds) {
    this.shown = seconds;
    this.draw(true);
  }

  schedule() {
    if (this.scheduled || this.paused || document.hidden || this.offset === null) return;
    this.scheduled = true;
    requestAnimationFrame(() => {
      this.scheduled = false;
      this.draw();
      // Without motion it goes on when the server next has something to tell.
      if (!still.matches) this.schedule();
    });
  }

  draw(now = false) {
    const at = performance.now();
    if (!now && at - this.drawn < (still.matches ? 900 : FRAME_MS)) return;
    if (now && this.paused && this.right === undefined) return;
    this.drawn = at;
    if (!this.paused && this.offset !== null) this.right = at * 1e3 + this.offset - BEHIND * 1e6;
    this.canvases.forEach((canvas, index) => this.lane(canvas, this.lanes[index]));
  }

  lane(canvas, lane) {
    const ratio = Math.min(devicePixelRatio || 1, 3);
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    if (width === 0) return;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.fillStyle = this.colours.track;
    pen.fillRect(0, 0, width, height);
    pen.fillStyle = this.colours.line;
    for (let tick = 1; tick < TICKS; tick++) pen.fillRect(Math.round((width * tick) / TICKS), 0, 1, height);
    pen.fillRect(0, height - 1, width, 1);
    if (this.right === undefined) return;
    const span = this.shown * 1e6;
    const left = this.right - span;
    const x = (micros) => (width * (micros - left)) / span;
    const low = Math.round(height * IDLE);
    pen.font = `600 10px ${this.colours.font}`;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    this.bars(pen, lane.idle, x, width, (from, to, idle) => {
      const cause = idle[2];
      pen.fillStyle = cause === "starved" ? this.stripes(pen) : this.colours[cause] ?? this.colours.unattributed;
      pen.fillRect(from, height - low, to - from, low);
      if (to - from >= 9) this.sign(pen, SIGNS[cause] ?? "?", from, to, height - low / 2, this.colours[`${cause}-sign`]);
    });
    this.bars(pen, lane.spans, x, width, (from, to, span) => {
      pen.fillStyle = this.colours[`g${span[2] % GROUPS}`];
      // A gap of a hair tells two micro-batches of a group apart.
      pen.fillRect(from, 0, Math.max(to - from - (to - from > 3 ? 0.75 : 0), 0.5), height);
      const text = String(span[2]);
      if (to - from >= 7 * text.length + 3) this.sign(pen, text, from, to, height / 2, this.colours.on);
    });
  }

  bars(pen, all, x, width, draw) {
    const step = Math.max(1, Math.ceil(all.length / DRAWN_MAX));
    for (let i = 0; i < all.length; i += step) {
      const [from, to] = [Math.max(0, x(all[i][0])), Math.min(width, x(all[i][1]))];
      if (to > from) draw(from, to, all[i]);
    }
  }

  sign(pen, text, from, to, y, colour) {
    pen.fillStyle = colour;
    pen.fillText(text, (from + to) / 2, y + 0.5);
  }

  stripes(pen) {
    if (this.striped?.of !== this.colours.starved + this.colours["starved-sign"]) {
      const tile = document.createElement("canvas");
      tile.width = tile.height = 6;
      const own = tile.getContext("2d");
      own.fillStyle = this.colours.starved;
      own.fillRect(0, 0, 6, 6);
      own.strokeStyle = this.colours.edge;
      own.lineWidth = 1.2;
      own.beginPath();
      for (const shift of [-6, 0, 6]) own.moveTo(shift - 1, 7), own.lineTo(shift + 7, -1);
      own.stroke();
      this.striped = { of: this.colours.starved + this.colours["starved-sign"], tile };
    }
    return pen.createPattern(this.striped.tile, "repeat");
  }
}
