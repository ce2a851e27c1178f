// Draws every diagram of the page in the reader's colours, and again when those change. Works from a file, too.
document.addEventListener("DOMContentLoaded", () => {
  const figures = [...document.querySelectorAll("pre.mermaid")].map((node) => ({ node, source: node.textContent }));

  const isDark = () => {
    const chosen = document.body.dataset.theme;
    return chosen === "dark" || (chosen !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);
  };

  const draw = async () => {
    mermaid.initialize({ startOnLoad: false, theme: isDark() ? "dark" : "neutral", securityLevel: "strict", state: { useMaxWidth: false } });
    for (const { node, source } of figures) {
      node.removeAttribute("data-processed");
      node.textContent = source;
    }
    await mermaid.run({ nodes: figures.map(({ node }) => node) });
  };

  draw();
  new MutationObserver(draw).observe(document.body, { attributes: true, attributeFilter: ["data-theme"] });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
});
