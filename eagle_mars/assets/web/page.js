// One tip for all relaxed tokens, kept inside the window; answers are redrawn while they stream, so events are delegated.
(() => {
  let tip;
  const show = (mark) => {
    if (!tip) {
      tip = document.createElement("div");
      tip.id = "em-tip";
      tip.setAttribute("role", "tooltip");
      document.body.append(tip);
    }
    tip.textContent = mark.dataset.tip;
    tip.hidden = false;
    const at = mark.getBoundingClientRect();
    const left = Math.min(at.left, window.innerWidth - tip.offsetWidth - 8);
    const below = at.bottom + 6;
    const fits = below + tip.offsetHeight < window.innerHeight;
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${fits ? below : at.top - tip.offsetHeight - 6}px`;
  };
  const update = (event) => {
    const mark = event.target.closest?.("mark.em-relaxed[data-tip]");
    if (mark) show(mark);
    else if (tip) tip.hidden = true;
  };
  for (const name of ["pointerover", "focusin", "click"]) document.addEventListener(name, update);
  document.addEventListener("scroll", () => { if (tip) tip.hidden = true; }, true);
})();
