/* Light or dark: as the system says, until someone chooses. In the head, so that no page flashes. */
(() => {
  const root = document.documentElement, system = matchMedia("(prefers-color-scheme: dark)");
  const other = () => root.dataset.theme === "dark" ? "light" : "dark";
  const chosen = () => {
    try { return localStorage.getItem("jali-theme"); } catch { return null; /* a page may have no storage */ }
  };
  function paint(theme) {
    root.dataset.theme = theme;
    document.getElementById("theme")?.setAttribute("aria-label", `Colours: ${theme}; change to ${other()}`);
    root.dispatchEvent(new Event("themechange"));
  }
  paint(chosen() || (system.matches ? "dark" : "light"));
  system.addEventListener("change", () => { if (!chosen()) paint(system.matches ? "dark" : "light"); });
  addEventListener("DOMContentLoaded", () => {
    paint(root.dataset.theme);
    document.getElementById("theme").addEventListener("click", () => {
      const theme = other();
      try { localStorage.setItem("jali-theme", theme); } catch { /* then it lasts as long as the page */ }
      paint(theme);
    });
  });
})();
