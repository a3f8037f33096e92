// The console works without this file. It adds live pages, streams, keys, the palette, the theme and local times.
"use strict";
(() => {
  const $ = (selector, within = document) => within.querySelector(selector);
  const $$ = (selector, within = document) => [...within.querySelectorAll(selector)];
  let saying = 0;
  const say = (text) => {
    const place = $("[data-said]");
    place.textContent = text;
    clearTimeout(saying);
    saying = setTimeout(() => { place.textContent = ""; }, 2500);
  };
  // Characters that turn the direction of the text after them are shown as their numbers, as the server does.
  const visible = (text) => text.replace(/[\u202a-\u202e\u2066-\u2069]/g, (one) => `⟨U+${one.codePointAt(0).toString(16).toUpperCase()}⟩`);

  // -- times: local, with UTC on hover ----------------------------------------------------------------------
  const local = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });
  const clock = new Intl.DateTimeFormat(undefined, { timeStyle: "medium" });
  // Today's times need no date: it would wrap in the narrow panes.
  const when = (at) => (new Date(at).toDateString() === new Date().toDateString() ? clock : local).format(at);
  const ago = (ms) => {
    const seconds = Math.max(0, ms) / 1000;
    for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"]])
      if (seconds >= size) return `${Math.floor(seconds / size)} ${unit} ago`;
    return `${Math.floor(seconds)} s ago`;
  };
  const span = (ms) => {
    const s = ms / 1000, two = (n) => String(n).padStart(2, "0");
    if (s < 60) return `${s.toFixed(0)} s`;
    const m = Math.floor(s / 60);
    if (m < 60) return `${m} min ${two(Math.floor(s % 60))} s`;
    return m < 2880 ? `${Math.floor(m / 60)} h ${two(m % 60)} min` : `${(m / 1440).toFixed(1)} d`;
  };
  const times = () => {
    const now = Date.now();
    for (const each of $$("time[datetime]")) {
      const at = Date.parse(each.dateTime);
      if (Number.isNaN(at) || (connection.isLost && each.hasAttribute("data-ago"))) continue; // its clock stands still
      each.textContent = each.hasAttribute("data-ago") ? ago(now - at) : when(at);
      each.title = `${local.format(at)} (${each.dateTime.slice(0, 19).replace("T", " ")} UTC)`;
    }
    if (!connection.isLost) for (const each of $$("[data-since]")) each.textContent = span(now - Date.parse(each.dataset.since));
  };

  // -- live parts: change what differs, keep what a person does ----------------------------------------------
  const morph = (old, next) => {
    if (old.nodeType !== next.nodeType || old.nodeName !== next.nodeName) { old.replaceWith(next.cloneNode(true)); return; }
    if (old.nodeType === Node.TEXT_NODE) { if (old.data !== next.data) old.data = next.data; return; }
    if (old.nodeType !== Node.ELEMENT_NODE) return;
    if (old.matches("form") && old.contains(document.activeElement)) return;
    if (next.matches("[data-lazy]") && !old.matches("[data-lazy]")) return; // it came already
    if (old.matches("time, [data-since]") && (old.dateTime || old.dataset.since) === (next.dateTime || next.dataset.since)) return;
    for (const { name } of [...old.attributes])
      if (!next.hasAttribute(name) && !(name === "open" && old.matches("details")) && name !== "class") old.removeAttribute(name);
    for (const { name, value } of [...next.attributes])
      if (old.getAttribute(name) !== value && !(name === "class" && old.matches("tr")) && name !== "open") old.setAttribute(name, value);
    if (old.matches("textarea, input, select")) return;
    const byId = new Map([...old.children].filter((each) => each.id).map((each) => [each.id, each]));
    let at = old.firstChild;
    for (const child of [...next.childNodes]) {
      const same = child.id ? byId.get(child.id) : at && !at.id ? at : null;
      if (same) {
        if (same !== at) old.insertBefore(same, at);
        const following = same.nextSibling;
        morph(same, child);
        at = following;
      } else old.insertBefore(child.cloneNode(true), at);
    }
    while (at) { const following = at.nextSibling; at.remove(); at = following; }
  };

  const load = (url) => connection.load(url, lives() !== null);
  const refresh = async () => {
    const url = location.href, page = await load(url);
    if (url !== location.href) return; // another step was chosen
    for (const old of $$("[data-live]")) {
      const next = page.getElementById(old.id);
      if (!next) continue;
      if (old.dataset.live === "rows" && old.matches("table") && next.matches("table")) hold(old, next);
      else morph(old, next);
    }
    const mark = $("[data-refresh]");
    if (mark && !$("[data-refresh]", page)) mark.remove();
    times();
  };
  // Rows change in place. New ones wait above the table, so that no row moves under the pointer.
  const hold = (old, next) => {
    let fresh = 0;
    const known = new Map($$("tbody tr", old).map((row) => [row.id, row]));
    const first = $("tbody tr", old);
    let beforeFirst = true;
    for (const row of $$("tbody tr", next)) {
      if (first && row.id === first.id) beforeFirst = false;
      if (known.has(row.id)) morph(known.get(row.id), row);
      else if (beforeFirst) fresh += 1;
    }
    const pill = $(".fresh");
    if (pill && fresh) { pill.hidden = false; pill.textContent = fresh === 1 ? "1 new task" : `${fresh} new tasks`; }
  };
  const lives = () => $("[data-live='rows'], [data-refresh], #questions[data-live], [data-live='always']");
  const tick = async () => {
    times();
    if (connection.isLost || (document.visibilityState === "visible" && lives() && !$("dialog[open]"))) {
      try { await refresh(); } catch { /* the next one may work */ }
    }
    setTimeout(tick, 2000);
  };

  // -- parts that take long: they come after the page -----------------------------------------------------------
  const lazy = async () => {
    for (const place of $$("[data-lazy]")) {
      try {
        const next = (await load(new URL(place.dataset.lazy, location.href))).getElementById(place.id);
        if (next) { morph(place, next); place.removeAttribute("data-lazy"); }
      } catch { place.removeAttribute("aria-busy"); }
    }
    times();
  };

  // -- saved views of the list, in this browser -----------------------------------------------------------------
  const saved = () => { try { return JSON.parse(localStorage.getItem("weft_views")) || []; } catch { return []; } };
  const views = () => {
    const place = $("[data-views]");
    if (!place) return;
    const here = new URLSearchParams(location.search);
    here.delete("cursor");
    const keep = (all) => { localStorage.setItem("weft_views", JSON.stringify(all)); draw(); };
    const draw = () => {
      const all = saved();
      $("ul", place).replaceChildren(...all.map(({ name, query }) => {
        const item = document.createElement("li"), link = document.createElement("a"), drop = document.createElement("button");
        link.href = `${location.pathname}?${query}`;
        link.textContent = name;
        if (query === here.toString()) link.setAttribute("aria-current", "true");
        drop.type = "button"; drop.className = "ghost small"; drop.textContent = "×";
        drop.setAttribute("aria-label", `Forget the view ${name}`);
        drop.onclick = () => keep(saved().filter((each) => each.name !== name));
        item.append(link, drop);
        return item;
      }));
      place.hidden = !all.length && !here.toString();
      $("form", place).hidden = !here.toString() || all.some(({ query }) => query === here.toString());
    };
    $("form", place).addEventListener("submit", (event) => {
      event.preventDefault();
      const name = event.target.elements.view.value.trim();
      if (!name) return;
      keep([...saved().filter((each) => each.name !== name), { name, query: here.toString() }]);
      event.target.reset();
      say(`Saved the view “${name}”.`);
    });
    draw();
  };

  // -- a notice is shown once: loading the page again, or a link to it, does not repeat it ----------------------
  const notice = () => {
    const here = new URL(location.href);
    if (!here.searchParams.has("notice")) return;
    for (const name of ["notice", "done", "left"]) here.searchParams.delete(name);
    history.replaceState(null, "", here);
  };

  // -- a step beside the time line ---------------------------------------------------------------------------
  let chosen = 0;
  const openStep = async (href) => {
    const choice = chosen += 1;
    const page = await load(href);
    if (choice !== chosen) return; // answers may come in another order
    for (const id of ["line", "detail"]) {
      const old = document.getElementById(id), next = page.getElementById(id);
      if (old && next) morph(old, next);
    }
    history.replaceState(null, "", href);
    times();
  };

  // -- streams -----------------------------------------------------------------------------------------------
  const TYPES = ["weft.task.accepted", "weft.output.delta", "weft.human.requested", "weft.step.recorded",
    "weft.task.completed", "weft.task.failed", "weft.task.cancelled"];
  const stream = (place) => {
    const source = new EventSource(place.dataset.stream);
    const empty = $("[data-empty]", place);
    const runs = new Map(); // run → attempt and its pieces
    const show = {
      output(type, data) {
        if (type !== "weft.output.delta" || data.progress) return;
        const run = runs.get(data.run_id) || { attempt: data.attempt, pieces: [] };
        if (data.attempt > run.attempt || data.restart) {
          for (const piece of run.pieces) { const gone = document.createElement("del"); gone.textContent = piece.textContent; piece.replaceWith(gone); }
          run.pieces = [];
        }
        run.attempt = data.attempt;
        runs.set(data.run_id, run);
        const text = data.text !== undefined ? data.text : JSON.stringify(data.value, null, 2);
        if (!text) return;
        empty.hidden = true;
        const piece = document.createElement("span");
        piece.textContent = visible(text);
        run.pieces.push(piece);
        $("pre", place).append(piece);
      },
      events(type, data, id) {
        empty.hidden = true;
        const item = document.createElement("li"), at = document.createElement("time"), name = document.createElement("b"), text = document.createElement("code");
        at.dateTime = new Date(Number(id.split("-")[0])).toISOString();
        at.textContent = when(Date.parse(at.dateTime));
        at.title = `${at.dateTime}, entry ${id}`;
        name.textContent = type;
        text.textContent = visible(JSON.stringify(data));
        item.append(at, name, text);
        $("ol", place).append(item);
      },
    }[place.dataset.show];
    for (const type of TYPES)
      source.addEventListener(type, (event) => {
        show(type, JSON.parse(event.data), event.lastEventId);
        if (/completed|failed|cancelled/.test(type)) { source.close(); refresh().catch(() => {}); }
      });
    source.addEventListener("error", () => { if (source.readyState === EventSource.CLOSED) empty.textContent = "The stream has ended, or its retention time is over."; });
  };

  // -- forms, copies, the theme ------------------------------------------------------------------------------
  const copy = async (text) => {
    try { await navigator.clipboard.writeText(text); say("Copied"); return true; } catch { return false; }
  };
  const theme = () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    document.cookie = `weft_theme=${root.dataset.theme}; path=/; max-age=31536000; samesite=strict`;
    say(root.dataset.theme === "dark" ? "Dark" : "Light");
  };
  const count = () => {
    const form = $("[data-bulk]");
    if (!form) return;
    const picked = $$("tbody input[type=checkbox]:checked", form).length;
    form.classList.toggle("selecting", picked > 0);
    $("[data-count]", form).textContent = `${picked} selected`;
  };
  /** Return what a button asks before it acts, with the number of selected rows for `#`. */
  const question = (button) => {
    const picked = $$("tbody input[type=checkbox]:checked", button.form || document).length;
    return button.dataset.confirm.replace(/# (selected (?:task|dead letter))s/, (_, noun) => `${picked} ${noun}${picked === 1 ? "" : "s"}`);
  };
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button, a, summary");
    if (!button) return;
    if (button.hasAttribute("data-copy")) {
      const text = button.dataset.copy || $("pre", button.closest("figure")).textContent;
      copy(text).then((done) => { if (done && !button.dataset.copy) { button.textContent = "Copied"; setTimeout(() => { button.textContent = "Copy"; }, 1200); } });
    } else if (button.hasAttribute("data-theme-toggle")) theme();
    else if (button.hasAttribute("data-palette")) palette();
    else if (button.hasAttribute("data-back") && history.length > 1) { event.preventDefault(); history.back(); } // the form is as it was
    else if (button.dataset.confirm && !confirm(question(button))) event.preventDefault();
    else if (button.hasAttribute("data-step") && $("#detail") && !event.metaKey && !event.ctrlKey) {
      event.preventDefault();
      openStep(button.href).catch(() => { if (!connection.isLost) location.href = button.href; });
    }
  });
  document.addEventListener("click", (event) => {
    for (const menu of $$("details.menu[open]")) if (!menu.contains(event.target)) menu.open = false;
  });
  document.addEventListener("change", (event) => {
    if (event.target.matches("[data-all]")) for (const each of $$("[data-bulk] tbody input[type=checkbox]:not(:disabled)")) each.checked = event.target.checked;
    if (event.target.matches(".filters select")) event.target.form.requestSubmit();
    count();
  });
  document.addEventListener("input", (event) => {
    const button = event.target.matches("[data-edits]") && $("[data-edited]", event.target.form);
    if (!button) return;
    button.dataset.plain ??= button.textContent;
    button.textContent = event.target.value === event.target.defaultValue ? button.dataset.plain : button.dataset.edited;
  });
  document.addEventListener("submit", (event) => {
    if (event.target.matches(".filters"))
      for (const each of $$("input, select", event.target)) if (!each.value) each.disabled = true; // a short URL
  });

  // -- the palette -------------------------------------------------------------------------------------------
  const palette = () => {
    const box = $("dialog.palette");
    if (!box || box.open) return;
    const input = $("input", box), list = $("ul", box);
    const item = (label, href, glyph, act) => {
      const line = document.createElement("li"), link = document.createElement("a");
      link.href = href;
      if (glyph) link.append(glyph.cloneNode(true));
      link.append(label);
      if (act) link.onclick = (event) => { event.preventDefault(); box.close(); setTimeout(act); }; // after this click has closed other menus
      line.append(link);
      return line;
    };
    // The buttons and menus of the page, under their own words.
    const actions = $$("#actions button:not(.sheet *), #actions summary").map((each) => [each.textContent.trim(), () => {
      if (each.matches("summary")) { each.parentElement.open = true; ($("textarea, input:not([type=hidden]), button", each.parentElement) || each).focus(); } else each.click();
    }]);
    let asked = "", waiting = 0;
    const draw = (found = []) => {
      const text = input.value.trim(), wanted = text.toLowerCase();
      const fits = (label) => label.toLowerCase().includes(wanted);
      list.replaceChildren(
        ...found.map(([label, href]) => item(label, href)),
        ...$$(".side nav a").filter((each) => fits(each.textContent)).map((each) => item(each.textContent.trim(), each.href, $("svg", each))),
        ...actions.filter(([label]) => fits(label)).map(([label, act]) => item(`${label} (this page)`, "#actions", null, act)),
        ...(text ? [item(`Search tasks for “${text}”`, `${$("form", box).action}?${new URLSearchParams({ q: text })}`)] : []),
      );
      if (text) $("a", list).classList.add("at");
    };
    const ask = async () => {
      const text = asked = input.value.trim();
      if (!text) return;
      const answer = await fetch(`${$("form", box).dataset.find}?${new URLSearchParams({ q: text })}`).catch(() => null);
      if (!answer?.ok || text !== asked || !box.open) return;
      const found = await answer.json();
      if (text === asked && found.length) draw(found);
    };
    input.value = "";
    input.oninput = () => { draw(); clearTimeout(waiting); waiting = setTimeout(ask, 120); };
    input.onkeydown = (event) => {
      const at = $("a.at", list);
      if (event.key === "ArrowDown" || event.key === "ArrowUp") {
        event.preventDefault();
        const all = $$("a", list), place = all.indexOf(at) + (event.key === "ArrowDown" ? 1 : -1);
        if (at) at.classList.remove("at");
        if (all[place]) all[place].classList.add("at");
      } else if (event.key === "Enter" && at) { event.preventDefault(); at.click(); }
    };
    draw();
    box.showModal();
    input.focus();
  };

  // -- keys --------------------------------------------------------------------------------------------------
  let gone = 0;
  const rows = () => $$(".rows tbody tr, .steps li, .card").filter((each) => $("a", each));
  const move = (by) => {
    const all = rows();
    if (!all.length) return;
    const now = all.findIndex((each) => each.classList.contains("at"));
    const next = all[Math.min(all.length - 1, Math.max(0, now < 0 ? (by > 0 ? 0 : all.length - 1) : now + by))];
    all.forEach((each) => each.classList.toggle("at", each === next));
    const link = $("a[data-open], a[data-row], a", next);
    link.focus({ preventScroll: true });
    next.scrollIntoView({ block: "nearest" });
    if (link.hasAttribute("data-row")) openStep(link.href).catch(() => {});
  };
  document.addEventListener("keydown", (event) => {
    if (event.key === "k" && (event.metaKey || event.ctrlKey)) { event.preventDefault(); palette(); return; }
    if (event.metaKey || event.ctrlKey || event.altKey || $("dialog[open]")) return;
    if (event.target.closest("input, textarea, select")) { if (event.key === "Escape") event.target.blur(); return; }
    if (Date.now() - gone < 1200) {
      gone = 0;
      const page = $(`[data-go="${CSS.escape(event.key)}"]`);
      if (page) { event.preventDefault(); location.href = page.href; return; }
    }
    const at = $(".at");
    const act = {
      j: () => move(1), k: () => move(-1), t: theme, g: () => { gone = Date.now(); },
      "?": () => $("dialog.help").showModal(), "/": palette,
      x: () => { const box = at && $("input[type=checkbox]:not(:disabled)", at); if (box) { box.checked = !box.checked; count(); } },
      u: () => { const up = $("[data-up]"); if (up) location.href = up.href; },
      Escape: () => { for (const menu of $$("details.menu[open]")) menu.open = false; },
    }[event.key];
    if (act) { event.preventDefault(); act(); }
  });

  notice();
  times();
  count();
  views();
  lazy();
  for (const place of $$("[data-stream]")) stream(place);
  setTimeout(tick, 2000);
})();
