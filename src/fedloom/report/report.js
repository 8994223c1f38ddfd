"use strict";
// Draws the plots from the data in the page, in the colors of the style sheet, and again when the colors or the width
// change. Without this script only the plots are missing.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  [...data.curves, ...data.diagnostics].forEach(
    (figure) => figure.lines.forEach((line) => Object.assign(line, data.axes[line.axis])),
  );
  const state = { y: 0, x: "round", task: 0, partition: 0, hidden: new Set() };
  const axes = { round: "rounds of training", bytes: "data sent", seconds: "time" };
  const config = {
    displaylogo: false,
    displayModeBar: "hover",
    modeBarButtons: [["toImage"]],
    toImageButtonOptions: { format: "svg", filename: "fedloom" },
  };
  const hues = 8;

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const kind = (line) => data.groups[line.group].kind;
  const paint = (line) => colour(`--c${kind(line) % hues}`);
  const dash = (line) => data.groups[line.group].dash.replace(/\d+/g, "$&px") || "solid";
  const faint = (hex, alpha) => hex + Math.round(alpha * 255).toString(16).padStart(2, "0");
  // Plotly interprets some HTML in its texts, so names are escaped.
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const cut = (text) => (text.length > 18 ? `${text.slice(0, 17)}…` : text);
  const short = (text) => plain(cut(text));
  const find = (id) => document.getElementById(id);
  const make = (name, parent, text = "", kind = "") => {
    const node = parent.appendChild(document.createElement(name));
    node.textContent = text;
    node.className = kind;
    return node;
  };

  const shape = (name, parent, given, text = "") => {
    const node = parent.appendChild(document.createElementNS("http://www.w3.org/2000/svg", name));
    Object.entries(given).forEach(([key, value]) => node.setAttribute(key, value));
    node.textContent = text;
    return node;
  };

  function layout(width, height, more) {
    const ink = colour("--soft"), family = getComputedStyle(document.body).fontFamily;
    const axis = ({ title, ...own } = {}) => ({
      title: { text: title, font: { size: 13 } },
      gridcolor: colour("--line"), linecolor: colour("--line"), zeroline: false, ticks: "",
      automargin: true, fixedrange: true, ...own,
    });
    return {
      width, height, autosize: false, showlegend: false,
      margin: { l: 8, r: 12, t: 10, b: 8 },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family, size: 13, color: ink },
      hoverlabel: {
        bgcolor: colour("--paper"), bordercolor: colour("--line"), font: { family, color: colour("--ink") },
      },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--line"), activecolor: ink },
      ...more, xaxis: axis(more.xaxis), yaxis: axis(more.yaxis),
    };
  }

  const shows = (line) =>
    data.groups[line.group].task === data.tasks[state.task] && !state.hidden.has(line.group);

  function time(lines) {
    const most = Math.max(...lines.map((line) => line.seconds.at(-1)), 0);
    return most > 7200 ? [3600, " h"] : most > 180 ? [60, " min"] : [1, " s"];
  }

  // With few rounds Plotly would put ticks at half rounds.
  const whole = (lines) => (Math.max(0, ...lines.flatMap((line) => line.round)) < 6 ? { dtick: 1 } : {});

  function curves() {
    const box = find("curves"), chosen = data.curves[state.y], lines = chosen.lines.filter(shows);
    const [unit, suffix] = state.x === "seconds" ? time(lines) : [1, state.x === "bytes" ? "B" : ""];
    const share = !chosen.key.includes("loss");
    const show = (value) => (share ? `${(100 * value).toFixed(2)} %` : value.toPrecision(4));
    const traces = lines.flatMap((line) => {
      const x = line[state.x].map((value) => value / unit), trace = [];
      if (Math.max(...line.seeds) > 1) {
        trace.push({
          x: [...x, ...[...x].reverse()], y: [...line.high, ...[...line.low].reverse()],
          fill: "toself", fillcolor: faint(paint(line), 0.16), line: { width: 0 }, mode: "lines", hoverinfo: "skip",
        });
      }
      trace.push({
        x, y: line.mean, mode: x.length > 1 ? "lines" : "markers",
        line: { color: paint(line), width: 2, dash: dash(line) },
        marker: { color: paint(line), size: 8 },
        text: line.mean.map((mean, at) => show(mean) + (line.round[at] ? "" : ", before training") + (line.seeds[at] > 1
          ? `  (${show(line.low[at])} to ${show(line.high[at])}, ${line.seeds[at]} seeds)` : "")),
        hovertemplate: `<b>${plain(data.groups[line.group].label)}</b>  %{text}<extra></extra>`,
      });
      return trace;
    });
    Plotly.react(box, traces, layout(box.clientWidth, box.clientWidth < 600 ? 300 : 420, {
      hovermode: state.x === "round" && box.clientWidth > 600 ? "x unified" : "closest",
      xaxis: {
        title: axes[state.x], ticksuffix: suffix, rangemode: "tozero", showgrid: false,
        tickformat: state.x === "bytes" ? "~s" : "", ...(state.x === "round" ? whole(lines) : {}),
      },
      yaxis: { tickformat: share ? ".2~%" : "" },
    }), config);
  }

  function partition() {
    const box = find("partition"), one = data.partitions[state.partition];
    const rows = one.classes.length, most = Math.max(...one.count);
    const height = Math.max(rows * (rows > 30 ? 12 : 26), 80) + 70;
    const room = box.parentElement.clientWidth;
    const width = Math.max(Math.min(room, one.clients * 64 + 140), one.clients * 11 + 90);
    const cell = Math.min((width - 80) / one.clients, (height - 70) / rows);
    const names = one.classes.map(plain);
    Plotly.react(box, [{
      x: one.client, y: one.label, mode: "markers", cliponaxis: false,
      marker: {
        size: one.count, sizemode: "area", sizeref: 2 * most / cell ** 2, sizemin: 0,
        color: faint(colour("--accent"), 0.8), line: { width: 0 },
      },
      text: one.count.map((count, at) => `<b>client ${one.client[at]}</b>, class ${names[one.label[at]]}<br>`
        + `${count} of its ${one.totals[one.client[at]]} samples`),
      hovertemplate: "%{text}<extra></extra>",
    }], layout(width, height, {
      hovermode: "closest",
      xaxis: { title: "client", range: [-0.7, one.clients - 0.3], showgrid: false,
        ...(one.clients > 30 ? {} : { tickmode: "linear", dtick: width / one.clients > 22 ? 1 : 5 }) },
      yaxis: { title: "class", range: [rows - 0.3, -0.7], ticksuffix: " ",
        ...(rows > 30 ? {} : { tickvals: names.map((_, at) => at), ticktext: one.classes.map(short) }) },
    }), config);
    const cut = one.of > one.clients ? ` Only the first ${one.clients} of ${one.of} clients are shown.` : "";
    find("partition-note").textContent = `The largest circle stands for ${most} samples.${cut}`;
  }

  function diagnostics() {
    const grid = find("diagnostics");
    data.diagnostics.forEach((one, at) => {
      const box = grid.children[at].lastElementChild;
      const traces = one.lines.filter(shows).map((line) => ({
        x: line.round, y: line.mean, mode: line.round.length > 1 ? "lines" : "markers",
        line: { color: paint(line), width: 1.8, dash: dash(line) },
        hovertemplate: `<b>${plain(data.groups[line.group].label)}</b>  %{y:.4~g}<extra></extra>`,
      }));
      Plotly.react(box, traces, layout(box.clientWidth, 170, {
        hovermode: "closest", xaxis: { showgrid: false, nticks: 5, ...whole(one.lines) }, yaxis: { nticks: 5, tickformat: "~g" },
      }), { displayModeBar: false });
    });
  }

  const parts = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  // From the background color to the accent color of the reader's theme.
  const blend = (share) => {
    const from = parts(colour("--wash")), to = parts(colour("--accent"));
    return from.map((value, at) => Math.round(value + share * (to[at] - value)));
  };
  // Relative luminance as in WCAG; `legible` picks the text color with the higher contrast.
  const bright = (rgb) => rgb.map((value) => (value / 255 > 0.04045 ? ((value / 255 + 0.055) / 1.055) ** 2.4
    : value / 3294.6)).reduce((sum, value, at) => sum + [0.2126, 0.7152, 0.0722][at] * value, 0.05);
  const legible = (rgb) => {
    const against = (name) => Math.abs(Math.log(bright(parts(colour(name))) / bright(rgb)));
    return colour(against("--ink") > against("--paper") ? "--ink" : "--paper");
  };

  // A cell without a result: four slanted lines.
  const hatch = [[0, 0.8, 0.3, 0], [0.1, 1, 0.55, 0], [0.4, 1, 0.8, 0], [0.65, 1, 1, 0.2]];

  function heat() {
    const { rows, columns, maps, better } = data.grid;
    const values = maps.flatMap((map) => map.cells.flat()).map((cell) => cell.value).filter((one) => one !== null);
    const low = Math.min(...values), high = Math.max(...values);
    const share = (value) => {
      const up = high > low ? (value - low) / (high - low) : 0.5;
      return better === "high" ? up : 1 - up;
    };
    const wide = 104, tall = 44, left = 16 + 8 * Math.max(...rows.names.map((name) => cut(name).length));
    maps.forEach((map, at) => {
      const box = find("grid").children[at].lastElementChild.firstElementChild;
      box.replaceChildren();
      const size = { width: left + columns.names.length * wide, height: 30 + rows.names.length * tall };
      const svg = shape("svg", box, { class: "heat", ...size });
      columns.names.forEach((name, x) => shape("text", svg,
        { x: left + (x + 0.5) * wide, y: 15, "text-anchor": "middle" }, cut(name)));
      map.cells.forEach((row, y) => {
        shape("text", svg, { x: left - 10, y: 30 + (y + 0.5) * tall, "text-anchor": "end" }, cut(rows.names[y]));
        row.forEach((cell, x) => {
          const group = shape("g", svg, { class: "cell", transform: `translate(${left + x * wide + 1} ${31 + y * tall})` });
          const paper = cell.value === null ? parts(colour("--wash")) : blend(share(cell.value));
          shape("title", group, {}, `${cell.method}\n${cell.hover}`);
          shape("rect", group, { width: wide - 2, height: tall - 2, rx: 3, fill: `rgb(${paper})` });
          if (cell.value === null) {
            hatch.forEach(([x0, y0, x1, y1]) => shape("line", group, {
              x1: x0 * (wide - 2), y1: y0 * (tall - 2), x2: x1 * (wide - 2), y2: y1 * (tall - 2), stroke: "var(--line)",
            }));
          } else {
            shape("text", group, { x: wide / 2 - 1, y: tall / 2 - 1, "text-anchor": "middle", fill: legible(paper) }, cell.text);
          }
        });
      });
    });
  }

  function choice(id, names, key, values, draw) {
    const box = find(id);
    if (names.length < 2) return;
    const buttons = names.map((name, at) => {
      const button = make("button", box, name);
      button.onclick = () => {
        state[key] = values[at];
        mark();
        draw();
      };
      return button;
    });
    const mark = () => buttons.forEach((one, at) => one.setAttribute("aria-pressed", state[key] === values[at]));
    mark();
  }

  function legend() {
    const box = find("legend");
    box.replaceChildren();
    data.groups.forEach((group, at) => {
      if (group.task !== data.tasks[state.task]) return;
      const button = make("button", box, "");
      const sample = shape("svg", button, { class: "sample", width: 28, height: 8, "aria-hidden": true });
      shape("line", sample, { x1: 1, x2: 27, y1: 4, y2: 4, stroke: `var(--c${group.kind % hues})`, "stroke-dasharray": group.dash });
      button.append(group.label);
      button.setAttribute("aria-pressed", !state.hidden.has(at));
      button.onclick = () => {
        if (!state.hidden.delete(at)) state.hidden.add(at);
        legend();
        lines();
      };
    });
  }

  function lines() {
    if (data.curves.length) curves();
    if (data.diagnostics.length) diagnostics();
  }

  function draw() {
    lines();
    if (data.partitions.length) partition();
    if (data.grid) heat();
  }

  if (data.curves.length) {
    const order = data.curves.map((_, at) => at);
    choice("choose-y", data.curves.map((one) => one.title), "y", order, curves);
    choice("choose-x", Object.values(axes), "x", Object.keys(axes), curves);
    choice("choose-task", data.tasks, "task", data.tasks.map((_, at) => at), () => { legend(); lines(); });
    legend();
  }
  if (data.partitions.length) {
    choice("choose-partition", data.partitions.map((one) => one.title), "partition",
      data.partitions.map((_, at) => at), partition);
  }
  data.diagnostics.forEach((one) => {
    const box = make("div", find("diagnostics"));
    make("h3", box, one.title);
    make("div", box, "", "plot");
  });
  (data.grid ? data.grid.maps : []).forEach((map) => {
    const box = make("div", find("grid"));
    make("h3", box, map.title);
    make("div", make("div", box, "", "scroll"));
  });
  document.querySelectorAll(".command").forEach((box) => {
    const button = make("button", box, "Copy");
    button.onclick = async () => {
      const text = box.querySelector("code").textContent;
      try {
        await navigator.clipboard.writeText(text);
      } catch { // without permission the text is only selected
        getSelection().selectAllChildren(box.querySelector("code"));
        document.execCommand("copy");
      }
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    };
  });
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  let width = document.body.clientWidth;
  new ResizeObserver(() => {
    if (width === document.body.clientWidth) return;
    width = document.body.clientWidth;
    draw();
  }).observe(document.body);
})();
