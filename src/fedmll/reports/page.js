"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const hidden = new Set(); // rows of the result table that the charts do not show
  const drawn = []; // one function per chart that draws it again
  const COLOURS = 8, SHAPES = 6;

  // ---- helpers

  const el = (tag, attributes = {}, ...children) => {
    const made = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  };
  const svg = (tag, attributes = {}, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const colour = (row) => `var(--c${row % COLOURS})`;
  const dashes = (row) => ["none", "7 3", "2 3"][Math.floor(row / COLOURS) % 3];
  const isDefined = (value) => value !== null && value !== undefined;

  const formatValue = (value, format) => {
    if (!isDefined(value)) return "–";
    if (format === "percent") return value.toFixed(2);
    if (format === "count") return Math.round(value).toLocaleString("en");
    return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
  };

  const shape = (row, x, y, size) => {
    const s = size, kind = row % SHAPES;
    if (kind === 0) return `M${x - s} ${y}a${s} ${s} 0 1 0 ${2 * s} 0a${s} ${s} 0 1 0 ${-2 * s} 0Z`;
    if (kind === 1) return `M${x - s} ${y - s}h${2 * s}v${2 * s}h${-2 * s}Z`;
    if (kind === 2) return `M${x} ${y - 1.25 * s}L${x + 1.2 * s} ${y + s}H${x - 1.2 * s}Z`;
    if (kind === 3) return `M${x} ${y - 1.35 * s}L${x + 1.35 * s} ${y}L${x} ${y + 1.35 * s}L${x - 1.35 * s} ${y}Z`;
    if (kind === 4) return `M${x} ${y + 1.25 * s}L${x + 1.2 * s} ${y - s}H${x - 1.2 * s}Z`;
    const t = s / 2.4; // a plus
    return `M${x - t} ${y - s}h${2 * t}v${s - t}h${s - t}v${2 * t}h${t - s}v${s - t}h${-2 * t}v${t - s}h${t - s}v${-2 * t}h${s - t}Z`;
  };

  const swatch = (row, lines) => {
    const box = svg("svg", { class: "swatch", viewBox: "0 0 22 12", "aria-hidden": "true" });
    if (lines) {
      const style = `stroke:${colour(row)};stroke-width:2;stroke-dasharray:${dashes(row)}`;
      box.append(svg("path", { d: "M0 6H22", style }));
    }
    box.append(svg("path", { d: shape(row, 11, 6, 3.6), style: `fill:${colour(row)}` }));
    return box;
  };

  // ---- axes

  const ticks = (low, high, count, log) => {
    if (log) {
      const found = [];
      for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
        for (const step of high / low > 1000 ? [1] : [1, 2, 5]) found.push(step * 10 ** power);
      const inside = found.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001).map((tick) => Number(tick.toPrecision(3)));
      if (inside.length > 2) return inside; // less than a decade: linear ticks
    }
    const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((s) => s * power).find((s) => s >= rough);
    const found = [];
    for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) found.push(Number((n * step).toPrecision(12)));
    return found;
  };

  const span = (values, axis) => {
    if (axis.limits) return axis.limits;
    const low = Math.min(...values), high = Math.max(...values);
    if (axis.log) return [low / 1.15, high * 1.15];
    const room = (high - low || Math.abs(high) || 1) * 0.06;
    return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
  };

  const scale = ([low, high], from, to, log) => {
    const at = log ? Math.log10 : (value) => value;
    const [a, b] = [at(low), at(high)];
    return (value) => from + ((at(value) - a) / (b - a)) * (to - from);
  };

  // ---- tooltip

  const tip = el("div", { class: "tip", role: "status", hidden: "" });
  const showTip = (plot, x, y, title, lines) => {
    const box = plot.parentElement;
    box.append(tip);
    tip.replaceChildren(el("b", {}, title));
    for (const [label, value, row] of lines) {
      const dot = el("i");
      if (row !== undefined) dot.style.background = colour(row);
      else dot.style.width = "0";
      tip.append(el("div", {}, el("span", {}, dot, label), el("span", {}, value)));
    }
    tip.hidden = false;
    const left = x - plot.scrollLeft + (x - plot.scrollLeft > plot.clientWidth / 2 ? -tip.offsetWidth - 14 : 14);
    tip.style.left = `${Math.max(0, Math.min(left, box.clientWidth - tip.offsetWidth))}px`;
    tip.style.top = `${plot.offsetTop + Math.max(0, y - tip.offsetHeight / 2)}px`;
  };
  const hideTip = () => { tip.hidden = true; };

  // ---- lines and points

  const pointsOf = (chart, x, y) =>
    chart.series.filter((series) => !hidden.has(series.row)).map((series) => {
      const of = series.columns, found = [];
      (of[x.key] || []).forEach((value, place) => {
        const height = (of[y.key] || [])[place];
        if (isDefined(value) && isDefined(height) && !(x.log && value <= 0))
          found.push({
            x: value, y: height, name: of.name && of.name[place], count: of.count && of.count[place],
            low: of[`${y.key}:low`] && of[`${y.key}:low`][place], high: of[`${y.key}:high`] && of[`${y.key}:high`][place],
          });
      });
      return { label: series.label, row: series.row, points: found };
    }).filter((series) => series.points.length);

  const drawXY = (chart, plot, x, y) => {
    const shown = pointsOf(chart, x, y), all = shown.flatMap((series) => series.points);
    plot.replaceChildren();
    if (!all.length) {
      plot.append(el("div", { class: "empty" }, hidden.size ? "Every row that has it is hidden." : "No run has this."));
      return;
    }
    const width = Math.max(260, plot.clientWidth);
    const ends = [...all.map((p) => p.y), ...all.flatMap((p) => [p.low, p.high]).filter(isDefined)];
    if (chart.reference === "zero") ends.push(0);
    const xSpan = span(all.map((p) => p.x), x), ySpan = span(ends, y);
    const names = x.names || [], longest = Math.max(0, ...names.map((name) => Math.min(24, name.length)));
    const upright = names.length > 0 && (width / names.length) < 7 * longest + 6;
    const top = 30, bottom = !names.length ? 46 : upright ? 18 + 6.6 * longest : 30;
    const height = Math.round(Math.min(360, Math.max(200, width * 0.42)) + top + bottom);
    const yTicks = ticks(...ySpan, Math.max(4, (height - top - bottom) / 50), false), labels = yTicks.map((tick) => formatValue(tick, "number"));
    const left = 14 + 7.2 * Math.max(...labels.map((label) => label.length)), right = 16;
    const toX = scale(xSpan, left, width - right, x.log), toY = scale(ySpan, height - bottom, top, false);
    const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
    picture.append(svg("title", {}, `${chart.title}: ${y.label} by ${x.label}`));
    yTicks.forEach((tick, place) => {
      picture.append(svg("line", { x1: left, x2: width - right, y1: toY(tick), y2: toY(tick), class: "rule" }));
      picture.append(svg("text", { x: left - 7, y: toY(tick) + 4, "text-anchor": "end" }, labels[place]));
    });
    names.forEach((name, place) => {
      const text = name.length > 24 ? `${name.slice(0, 23)}…` : name, at = [toX(place), height - bottom + 18];
      const how = upright ? { "text-anchor": "end", transform: `translate(${at[0] + 4} ${at[1] - 10}) rotate(-90)` }
        : { "text-anchor": "middle", x: at[0], y: at[1] };
      picture.append(svg("text", how, text));
    });
    let free = -Infinity;
    if (!names.length) ticks(...xSpan, width / 90, x.log).filter((tick) => x.format !== "count" || Number.isInteger(tick)).forEach((tick) => {
      const label = formatValue(tick, "number"), half = 3.6 * label.length;
      if (toX(tick) - half < free) return;
      free = toX(tick) + half + 8;
      picture.append(svg("line", { x1: toX(tick), x2: toX(tick), y1: height - bottom, y2: height - bottom + 4, class: "base" }));
      picture.append(svg("text", { x: toX(tick), y: height - bottom + 18, "text-anchor": "middle" }, label));
    });
    picture.append(svg("line", { x1: left, x2: width - right, y1: height - bottom, y2: height - bottom, class: "base" }));
    if (!names.length) picture.append(svg("text", { x: width - right, y: height - 8, "text-anchor": "end", class: "title" }, x.label));
    picture.append(svg("text", { x: 2, y: 14, class: "title" }, y.label));
    if (chart.reference === "zero") picture.append(svg("path", { d: `M${left} ${toY(0)}H${width - right}`, class: "compare" }));
    if (chart.reference === "diagonal")
      picture.append(svg("path", { d: `M${toX(0)} ${toY(0)}L${toX(1)} ${toY(1)}`, class: "compare" }));
    shown.forEach((series) => drawSeries(picture, chart.kind, series, toX, toY));
    if (names.length) shown.forEach((series) => drawMean(picture, series, toX, toY));
    const mark = svg("circle", { r: 6.5, style: "fill:none;stroke:var(--ink);stroke-width:1.5", visibility: "hidden" });
    picture.append(mark);
    plot.append(picture);
    follow(picture, plot, mark, shown, toX, toY, x, y);
  };

  const drawSeries = (picture, kind, series, toX, toY) => {
    const at = series.points.map((p) => [toX(p.x).toFixed(1), toY(p.y).toFixed(1)]);
    const group = svg("g", { "data-series": series.label });
    if (kind === "lines") {
      const band = series.points.filter((p) => isDefined(p.low) && isDefined(p.high));
      if (band.length > 1) {
        const upper = band.map((p) => `${toX(p.x).toFixed(1)} ${toY(p.high).toFixed(1)}`);
        const lower = band.map((p) => `${toX(p.x).toFixed(1)} ${toY(p.low).toFixed(1)}`).reverse();
        group.append(svg("path", { d: `M${[...upper, ...lower].join("L")}Z`, style: `fill:${colour(series.row)};opacity:0.13` }));
      } else if (band.length === 1) {
        const p = band[0], style = `stroke:${colour(series.row)};stroke-width:1.5`;
        group.append(svg("path", { d: `M${toX(p.x)} ${toY(p.low)}V${toY(p.high)}`, style }));
      }
      const style = `fill:none;stroke:${colour(series.row)};stroke-width:2;stroke-linejoin:round;stroke-dasharray:${dashes(series.row)}`;
      if (at.length > 1) group.append(svg("path", { d: `M${at.map((p) => p.join(" ")).join("L")}`, style }));
    }
    const size = kind === "points" ? 3.8 : at.length === 1 ? 4.5 : 2.8;
    if (kind === "points" || at.length <= 40) {
      const d = at.map(([px, py]) => shape(series.row, Number(px), Number(py), size)).join("");
      const style = `fill:${colour(series.row)};` + (kind === "points" ? "fill-opacity:0.75;stroke:var(--paper);stroke-width:0.6" : "");
      group.append(svg("path", { d, style }));
    }
    picture.append(group);
  };

  const drawMean = (picture, series, toX, toY) => {
    const mean = series.points.reduce((sum, p) => sum + p.y, 0) / series.points.length;
    const at = series.points.map((p) => toX(p.x)), y = toY(mean), style = `stroke:${colour(series.row)};stroke-width:3`;
    picture.append(svg("path", { d: `M${Math.min(...at) - 6} ${y}H${Math.max(...at) + 6}`, style }));
  };

  const follow = (picture, plot, mark, shown, toX, toY, x, y) => {
    picture.addEventListener("pointermove", (event) => {
      const box = picture.getBoundingClientRect(), mx = event.clientX - box.left, my = event.clientY - box.top;
      let best = null, nearest = Infinity;
      for (const series of shown)
        for (const p of series.points) {
          const far = (toX(p.x) - mx) ** 2 + ((toY(p.y) - my) ** 2) / 2;
          if (far < nearest) { nearest = far; best = p; }
        }
      if (!best) return;
      mark.setAttribute("cx", toX(best.x));
      mark.setAttribute("cy", toY(best.y));
      mark.setAttribute("visibility", "visible");
      const same = shown.flatMap((series) =>
        series.points.filter((p) => (best.name === undefined ? p.x === best.x : p.name === best.name))
          .map((p) => [series.label, valueText(p, y), series.row, p.y]));
      same.sort((a, b) => b[3] - a[3]);
      const title = best.name !== undefined && x.names.length ? best.name : best.name === undefined ? `${x.label}: ${formatValue(best.x, x.format)}` : `${best.name} · ${formatValue(best.x, x.format)}`;
      showTip(plot, toX(best.x), toY(best.y), title, same.slice(0, 16));
    });
    picture.addEventListener("pointerleave", () => { mark.setAttribute("visibility", "hidden"); hideTip(); });
  };
  const valueText = (p, y) => formatValue(p.y, y.format)
    + (isDefined(p.low) ? ` (${formatValue(p.low, y.format)}–${formatValue(p.high, y.format)})` : "")
    + (isDefined(p.count) ? `, ${p.count.toLocaleString("en")}` : "");

  // ---- heatmaps

  const drawHeatmap = (chart, plot, heatmap) => {
    const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
    const left = 12 + 7 * Math.min(16, Math.max(...heatmap.rows.map((name) => name.length)));
    const top = 14 + 6.6 * Math.min(18, Math.max(...heatmap.columns.map((name) => name.length)));
    const cell = Math.max(11, Math.min(44, (plot.clientWidth - left - 4) / heatmap.columns.length));
    const tall = Math.max(11, Math.min(24, cell));
    const width = left + cell * heatmap.columns.length + 2, height = top + tall * heatmap.rows.length + 4;
    const most = Math.max(1, ...heatmap.values.flat().filter(isDefined));
    const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
    picture.append(svg("title", {}, `${chart.title}, ${heatmap.label}`));
    const pattern = svg("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
    pattern.append(svg("line", { x1: 0, y1: 0, x2: 0, y2: 6, style: "stroke:var(--soft);stroke-width:1.2;opacity:0.55" }));
    picture.append(pattern);
    heatmap.columns.forEach((name, place) => {
      const px = left + cell * (place + 0.5) + 4;
      const text = svg("text", { transform: `translate(${px} ${top - 6}) rotate(-90)` }, cut(name, 18));
      picture.append(text);
    });
    heatmap.rows.forEach((name, line) => {
      picture.append(svg("text", { x: left - 7, y: top + tall * (line + 0.5) + 4, "text-anchor": "end" }, cut(name, 16)));
      heatmap.values[line].forEach((value, place) => {
        const part = isDefined(value) ? Math.log(1 + value) / Math.log(1 + most) : 0;
        const style = isDefined(value) ? `fill:var(--map);fill-opacity:${value ? (0.1 + 0.9 * part).toFixed(3) : 0.06}` : "fill:url(#hatch)";
        const x = left + cell * place, y = top + tall * line;
        picture.append(svg("rect", { x: x + 0.5, y: y + 0.5, width: cell - 1, height: tall - 1, style, "data-cell": `${line},${place}` }));
        const text = isDefined(value) && value ? String(value) : "";
        if (text && cell >= 7.2 * text.length + 3 && tall >= 15) {
          const ink = 0.1 + 0.9 * part > 0.55 ? "var(--on-map)" : "var(--ink)";
          const at = { x: x + cell / 2, y: y + tall / 2 + 4, "text-anchor": "middle", style: `fill:${ink};font-size:11px;pointer-events:none` };
          picture.append(svg("text", at, text));
        }
      });
    });
    picture.addEventListener("pointermove", (event) => {
      const at = event.target.dataset && event.target.dataset.cell;
      if (!at) { hideTip(); return; }
      const [line, place] = at.split(",").map(Number), value = heatmap.values[line][place];
      const text = isDefined(value) ? value.toLocaleString("en") : "not annotated";
      showTip(plot, left + cell * (place + 0.5), top + tall * line, heatmap.rows[line], [[heatmap.columns[place], text]]);
    });
    picture.addEventListener("pointerleave", hideTip);
    plot.replaceChildren(picture);
  };

  // ---- controls

  const chooser = (options, label, chosen) => {
    const box = el("select", { "aria-label": label });
    options.forEach((option, place) => box.append(el("option", { value: place }, option)));
    box.addEventListener("change", () => chosen(Number(box.value)));
    return box;
  };
  const segments = (options, label, chosen) => {
    const box = el("div", { class: "choice", role: "group", "aria-label": label });
    options.forEach((option, place) => {
      const button = el("button", { type: "button", "aria-pressed": place === 0 }, option);
      button.addEventListener("click", () => {
        for (const other of box.children) other.setAttribute("aria-pressed", other === button);
        chosen(place);
      });
      box.append(button);
    });
    return box;
  };

  const legend = (chart, box) => {
    for (const series of chart.series) {
      const button = el("button", { type: "button", "aria-pressed": "true", "data-row": series.row, title: "show or hide" });
      button.append(swatch(series.row, chart.kind === "lines"), series.label);
      button.addEventListener("click", () => toggle(series.row, hidden.has(series.row)));
      box.append(button);
    }
  };

  const toggle = (row, show) => {
    if (show) hidden.delete(row); else hidden.add(row);
    for (const button of document.querySelectorAll(".legend button"))
      button.setAttribute("aria-pressed", !hidden.has(Number(button.dataset.row)));
    for (const line of document.querySelectorAll("tr[data-row]")) {
      const off = hidden.has(Number(line.dataset.row));
      line.classList.toggle("hidden", off);
      line.querySelector("input").checked = !off;
    }
    drawn.forEach((draw) => draw());
  };

  const numbers = (chart, box) => {
    box.addEventListener("toggle", () => {
      if (!box.open || box.dataset.filled) return;
      box.dataset.filled = "yes";
      const keys = [...new Set(chart.series.flatMap((series) => Object.keys(series.columns)))];
      const table = el("table"), body = el("tbody"), line = (tag, cells) => el("tr", {}, ...cells.map((cell) => el(tag, {}, cell)));
      table.append(el("thead", {}, line("th", ["", ...keys])), body);
      for (const series of chart.series)
        series.columns[keys[0]].forEach((_, place) => body.append(line("td", [series.label, ...keys.map((key) => {
          const value = (series.columns[key] || [])[place];
          return typeof value === "string" ? value : formatValue(value, "number");
        })])));
      box.append(el("div", { class: "scroll" }, table));
    });
  };

  for (const chart of data.charts) {
    const figure = document.querySelector(`figure[data-chart="${chart.name}"]`);
    const plot = figure.querySelector(".plot"), controls = figure.querySelector(".controls");
    let x = 0, y = 0, heatmap = 0, last = 0;
    const draw = () => {
      last = plot.clientWidth;
      hideTip();
      if (chart.kind === "heatmap") drawHeatmap(chart, plot, chart.heatmaps[heatmap]);
      else drawXY(chart, plot, chart.xs[x], chart.ys[y]);
    };
    if (chart.kind === "heatmap") {
      if (chart.heatmaps.length > 1)
        controls.append(chooser(chart.heatmaps.map((one) => one.label), "partition", (n) => { heatmap = n; draw(); }));
      figure.querySelector(".numbers").remove();
    } else {
      if (chart.ys.length > 1) controls.append(chooser(chart.ys.map((axis) => axis.label), "metric", (n) => { y = n; draw(); }));
      if (chart.xs.length > 1)
        controls.append(segments(chart.xs.map((axis) => `by ${axis.key}`), "horizontal axis", (n) => { x = n; draw(); }));
      legend(chart, figure.querySelector(".legend"));
      numbers(chart, figure.querySelector(".numbers"));
    }
    drawn.push(draw);
    new ResizeObserver(() => { if (plot.clientWidth !== last) draw(); }).observe(plot);
    draw();
  }

  // ---- result table

  const table = document.querySelector("table.results");
  if (table) {
    for (const line of table.querySelectorAll("tr[data-row]")) {
      const row = Number(line.dataset.row), box = line.querySelector("input");
      line.querySelector("label").insertBefore(swatch(row, false), line.querySelector(".name"));
      box.addEventListener("change", () => toggle(row, box.checked));
    }
    table.querySelectorAll("thead th").forEach((heading, column) => {
      heading.querySelector("button").addEventListener("click", () => {
        const down = heading.getAttribute("aria-sort") !== (column ? "descending" : "ascending");
        for (const other of table.querySelectorAll("thead th")) other.removeAttribute("aria-sort");
        heading.setAttribute("aria-sort", (column ? down : !down) ? "descending" : "ascending");
        const key = (line) => line.cells[column].dataset.value, sign = (column ? down : !down) ? -1 : 1;
        const lines = [...table.tBodies[0].rows].sort((a, b) => {
          if (column === 0) return sign * key(a).localeCompare(key(b));
          if (key(a) === "" || key(b) === "") return (key(a) === "") - (key(b) === "");
          return sign * (Number(key(a)) - Number(key(b)));
        });
        table.tBodies[0].append(...lines);
      });
    });
    const more = document.getElementById("all-metrics");
    if (more) more.addEventListener("click", () => {
      const all = table.classList.toggle("all");
      more.setAttribute("aria-pressed", all);
      more.textContent = all ? "Show fewer metrics" : "Show all metrics";
    });
  }

  // ---- light and dark

  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)");
  const button = document.getElementById("theme");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const name = () => { button.textContent = isDark() ? "Light" : "Dark"; };
  button.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; name(); });
  dark.addEventListener("change", name);
  name();
})();
