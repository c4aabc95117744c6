"use strict";
// Draws the charts when they come into sight, in the colours of the style sheet, and again when those change. Plotly
// stands on the page as text and is read when the page is there: it takes a second, and the first screen has no chart.
(() => {
  const CONFIG = { responsive: true, displayModeBar: false };
  const drawn = new Map(); // element -> its data
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function themed(figure) {
    const ink = colour("--ink"), line = colour("--line"), clear = "rgba(0,0,0,0)";
    const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, color: ink };
    const data = figure.data.map((trace) => {
      const own = colour(`--c${trace.meta.colour % 7}`);
      if (trace.type === "heatmap") return { ...trace, colorbar: { tickfont: { color: ink } } };
      const marker = { ...trace.marker, color: own };
      if (marker.pattern) marker.pattern = { ...marker.pattern, fillmode: "overlay", fgcolor: colour("--ground"), fgopacity: 0.6, solidity: 0.15 };
      return { ...trace, marker, line: { ...trace.line, color: own } };
    });
    const shapes = (figure.layout.shapes || []).map((one) => ({ ...one, line: { ...one.line, color: ink } }));
    const layout = {
      ...figure.layout, shapes, paper_bgcolor: clear, plot_bgcolor: clear, font: { color: ink, size: 13 },
      margin: { l: 10, r: 10, t: 10, b: 10 }, legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom" },
      xaxis: { ...figure.layout.xaxis, ...axis }, yaxis: { ...figure.layout.yaxis, ...axis },
    };
    return [data, layout];
  }

  function read() { // as script, what stands on the page as text
    if (window.Plotly) return;
    const made = document.createElement("script");
    made.textContent = document.getElementById("plotly").textContent;
    document.head.append(made);
  }

  function draw(element) {
    read();
    if (!drawn.has(element)) drawn.set(element, JSON.parse(document.getElementById(element.dataset.chart).textContent));
    Plotly.react(element, ...themed(drawn.get(element)), CONFIG);
  }

  const charts = [...document.querySelectorAll("[data-chart]")];
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting) { seen.unobserve(entry.target); draw(entry.target); }
    }
  }, { rootMargin: "300px" });
  const begin = () => charts.forEach((element) => seen.observe(element));
  addEventListener("load", () => setTimeout(begin, 50)); // the first screen is painted before
  for (const query of ["(prefers-color-scheme: dark)", "print"]) {
    matchMedia(query).addEventListener("change", () => [...drawn.keys()].forEach(draw));
  }
  addEventListener("beforeprint", () => charts.forEach(draw));
})();
