"use strict";
// As https://perfetto.dev/docs/visualization/deep-linking-to-perfetto-ui says: ask until the viewer answers, then post.
const VIEWER = "https://ui.perfetto.dev";
const {title: name, value: content} = document.getElementById("trace");
const state = document.getElementById("state");
document.getElementById("open").addEventListener("click", () => {
  const viewer = window.open(VIEWER);
  if (!viewer) { state.textContent = "The browser blocked the new tab: allow it, and click again."; return; }
  state.textContent = "Waiting for the viewer.";
  const asking = setInterval(() => viewer.postMessage("PING", VIEWER), 50);
  window.addEventListener("message", function answered(event) {
    if (event.origin !== VIEWER || event.source !== viewer || event.data !== "PONG") return;
    clearInterval(asking); window.removeEventListener("message", answered);
    const bytes = Uint8Array.from(atob(content), (one) => one.charCodeAt(0));
    viewer.postMessage({perfetto: {buffer: bytes.buffer, title: name, fileName: name}}, VIEWER);
    state.textContent = "Handed over.";
  });
});
