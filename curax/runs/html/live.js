// A page that is served renews itself when the files of the run change.
(() => {
  let version = {{ version | tojson }};
  if (version === null) return;
  const browser = typeof browse === "undefined" ? null : browse;
  const status = document.getElementById("status");
  const clock = () => new Date().toLocaleTimeString();
  async function renew() {
    const page = new DOMParser().parseFromString(await (await fetch(location.href, { cache: "no-store" })).text(), "text/html");
    const old = document.querySelectorAll("[data-live]"), fresh = page.querySelectorAll("[data-live]");
    if (old.length !== fresh.length || (browser === null) !== (page.getElementById("browser") === null)) return location.reload();
    old.forEach((element, i) => { element.innerHTML = fresh[i].innerHTML; });
    if (browser) browser(embedded(page));
    status.textContent = "Live: renewed at " + clock() + ".";
  }
  async function look() {
    try {
      const answer = await fetch("version", { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.status);
      const now = await answer.text();
      if (now !== version) { await renew(); version = now; }
      else if (status.hidden || status.dataset.lost) status.textContent = "Live: up to date at " + clock() + ".";
      delete status.dataset.lost;
    } catch (error) {
      if (!status.dataset.lost) status.textContent = "The server has not answered since " + clock() + "; what is shown is from before.";
      status.dataset.lost = "yes";
    }
    status.hidden = false;
    setTimeout(look, 2000);
  }
  look();
})();
