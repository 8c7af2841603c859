// Runs before anything is drawn: says that scripts run, and sets the colours the reader chose before.
(() => {
  const root = document.documentElement;
  root.classList.add("scripts");
  try {
    const theme = localStorage.getItem("tonnage-theme");
    if (theme === "light" || theme === "dark") root.dataset.theme = theme;
  } catch {
    // Storage is switched off: the system decides.
  }
})();
