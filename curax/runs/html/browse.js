const browse = (() => {
  const get = (id) => document.getElementById(id);
  if (!get("browser")) return null;  // supervised training alone
  const PAGE = 40;
  let data, rows = [], steps = [], seeds = [], last = 0;
  let when = 0, shown = PAGE;  // a place in steps, or "all"

  const read = () => data.rows.map(([step, seed, prompt, id, slot, text, tokens, outcome, reward, advantage, strip, level]) => ({
    step, seed, prompt, id, slot, text, tokens, outcome, reward, advantage, level, strip: data.strips[strip],
    kind: outcome === null ? "missing" : outcome >= 1 ? "solved" : "failed",
    lower: (data.prompts[prompt] + "\n" + text).toLowerCase(),
  }));
  const make = (tag, className, text) => {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;  // text, never markup
    return element;
  };
  const number = (value, digits) => value === null || value === undefined ? "–"
    : (Number.isInteger(value) ? String(value) : value.toFixed(digits)).replace("-", "−");
  const signed = (value) => (value > 0 ? "+" : "") + number(value, 3);

  function passage(cell, text, place) {
    const body = make("div", "text", text === "" ? "(empty)" : text);
    cell.append(body);
    if (place) cell.append(make("div", "place", place));
    return body;
  }
  function heat(cell, strip) {  // a reference answer, its tokens the deeper in colour the more they weigh
    const most = Math.max(...strip.map(([, weight]) => weight));
    const body = make("div", "strip");
    body.append(make("small", "place", "reference"));
    body.title = "Reference answer; the deeper the colour of a token, the more it weighs in the reward";
    for (const [word, weight] of strip) {
      const token = make("span", "", word);
      token.style.setProperty("--heat", (most > 0 ? 100 * weight / most : 0).toFixed(0) + "%");
      token.title = (100 * weight).toFixed(1) + "% of the reward";
      body.append(token);
    }
    cell.append(body);
  }
  function line(row, previous) {
    const fresh = previous && (previous.prompt !== row.prompt || previous.step !== row.step || previous.seed !== row.seed);
    const tr = make("tr", fresh ? "new" : "");
    const cell = (name, className, text) => {
      const td = make("td", className, text);
      td.dataset.name = name;
      tr.append(td);
      return td;
    };
    const name = (word, value) => value === null ? "" : word + " " + value;
    const place = [name("prompt", row.id), name("slot", row.slot), name("hint level", row.level), when === "all" ? "step " + steps[row.step] : "", seeds.length > 1 ? "seed " + row.seed : ""];
    const asked = cell("Prompt");
    passage(asked, data.prompts[row.prompt], place.filter(Boolean).join(", "));
    if (row.strip.length) heat(asked, row.strip);
    passage(cell("Completion"), row.text);
    cell("Tokens", "number", row.tokens);
    const mark = make("span", "mark " + row.kind, { solved: "✓", failed: "✗", missing: "?" }[row.kind]);
    mark.title = row.kind;
    const outcome = cell("Outcome", "number");
    if (row.outcome !== null && row.outcome !== 0 && row.outcome !== 1) outcome.append(number(row.outcome, 2) + " ");
    outcome.append(mark);
    cell("Reward", "number", number(row.reward, 3));
    cell("Advantage", "number " + (row.advantage > 0 ? "plus" : row.advantage < 0 ? "minus" : ""), signed(row.advantage));
    return tr;
  }
  function fold(root) {
    const long = [...root.querySelectorAll(".text")].filter((body) => body.scrollHeight > body.clientHeight + 4);
    for (const body of long) {
      const more = make("button", "more", "show all");
      more.type = "button";
      more.onclick = () => { more.textContent = body.classList.toggle("open") ? "show less" : "show all"; };
      body.after(more);
    }
  }
  function draw() {
    const seed = get("seed").value, kind = get("outcome").value;
    const words = get("search").value.trim().toLowerCase();
    const found = rows.filter((row) => (when === "all" || row.step === when)
      && (seed === "" || String(row.seed) === seed) && (kind === "" || row.kind === kind) && row.lower.includes(words));
    const known = found.filter((row) => row.kind !== "missing");
    const solved = found.filter((row) => row.kind === "solved").length;
    const judged = kind === "" && known.length > 0;
    get("summary").textContent = found.length + (found.length === 1 ? " completion" : " completions")
      + (judged ? ": " + solved + " of " + known.length + " solved (" + (100 * solved / known.length).toFixed(0) + "%)" : "")
      + (judged && known.length < found.length ? ", " + (found.length - known.length) + " without an outcome" : "") + ".";
    const body = get("rows");
    body.replaceChildren(...found.slice(0, shown).map((row, i) => line(row, found[i - 1])));
    fold(body);
    get("next").hidden = found.length <= shown;
    get("next").textContent = "Show " + Math.min(PAGE, found.length - shown) + " more of " + (found.length - shown);
    get("before").setAttribute("aria-pressed", when === 0);
    get("after").setAttribute("aria-pressed", when === last && last > 0);
    get("all").setAttribute("aria-pressed", when === "all");
    get("at").textContent = when === "all" ? "all" : steps[when] + " of " + steps[last];
    if (when !== "all") get("step").value = when;
  }
  const change = (act) => () => { act(); shown = PAGE; draw(); };

  get("before").onclick = change(() => { when = 0; });
  get("after").onclick = change(() => { when = last; });
  get("all").onclick = change(() => { when = "all"; });
  get("step").oninput = change(() => { when = Number(get("step").value); });
  get("seed").onchange = get("outcome").onchange = get("search").oninput = change(() => {});
  get("next").onclick = () => { shown += PAGE; draw(); };

  function show(given) {  // what the reader chose stays chosen; who looks at the last step follows it
    const follows = when === last || last < 0, at = when === "all" ? when : steps[when];
    data = given;
    rows = read();
    steps = data.steps;
    last = steps.length - 1;
    get("none").hidden = rows.length > 0;
    get("browser").hidden = !rows.length;
    if (!rows.length) return;
    when = at === "all" ? at : follows ? last : Math.max(steps.indexOf(at), 0);
    seeds = [...new Set(rows.map((row) => row.seed))].sort((a, b) => a - b);
    const offered = new Set([...get("seed").options].map((option) => option.value));
    for (const seed of seeds) if (!offered.has(String(seed))) get("seed").append(make("option", "", seed));
    get("seeded").hidden = seeds.length < 2;
    get("slide").hidden = steps.length < 3;
    get("all").hidden = get("after").hidden = !last;
    get("step").max = last;
    get("before").textContent = steps[0] === 0 ? "Before" : "Step " + steps[0];
    get("after").textContent = data.finished ? "After" : "Step " + steps[last];
    get("left").textContent = data.logged > rows.length
      ? "To stay small, this page holds " + rows.length + " of the " + data.logged + " logged completions: those of " + steps.length + " of "
        + data.logged_steps + " steps, the first, the last, and evenly between. All are in rollouts.jsonl." : "";
    draw();
  }
  return show;
})();
const embedded = (root) => JSON.parse(root.getElementById("data").textContent);
if (browse) browse(embedded(document));
