// One tip for all relaxed tokens, kept inside the window; answers are redrawn while they stream, so events are delegated.
(() => {
  const tip = document.createElement("div");
  tip.id = "em-tip";
  tip.setAttribute("role", "tooltip");
  tip.hidden = true;
  let mark = null;

  const place = () => {
    const at = mark?.getBoundingClientRect();
    tip.hidden = !mark?.isConnected || at.bottom < 0 || at.top > window.innerHeight;
    if (tip.hidden) return;
    tip.textContent = mark.dataset.tip;
    const below = at.bottom + 6;
    const fits = below + tip.offsetHeight < window.innerHeight;
    tip.style.left = `${Math.max(8, Math.min(at.left, window.innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${fits ? below : at.top - tip.offsetHeight - 6}px`;
  };
  const choose = (event) => {
    mark = event.target.closest?.("mark.em-relaxed[data-tip]") ?? null;
    if (!tip.isConnected) document.body.append(tip);
    place();
  };
  for (const name of ["pointerover", "focusin", "click"]) document.addEventListener(name, choose);
  document.addEventListener("scroll", place, true);
})();
