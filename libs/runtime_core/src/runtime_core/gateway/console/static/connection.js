// Says when the gateway does not answer, and keeps a form on the page until it does.
"use strict";
const connection = (() => {
  const clock = new Intl.DateTimeFormat(undefined, { timeStyle: "medium" });
  let since = null; // when the last refresh worked no more; null: it works
  let leaving = 0; // when the browser began to open another page, which ends the requests of this one
  addEventListener("beforeunload", () => { leaving = Date.now(); });

  const found = () => { since = null; document.querySelector("[data-lost]").replaceChildren(); };
  const AWAY = "No connection to the gateway", AGAIN = "trying again";
  const lost = (why = AWAY, then = AGAIN, unsent = false) => {
    if (!unsent && Date.now() - leaving < 3000) return;
    since ??= new Date();
    const line = document.createElement("p");
    line.className = "notice";
    line.textContent = `${unsent ? "Nothing was sent. " : ""}${why} since ${clock.format(since)}; ${then}.`;
    const place = document.querySelector("[data-lost]"), shown = place.firstElementChild;
    // A screen reader says the line once, not at each attempt.
    if (!shown || (shown.textContent !== line.textContent && (unsent || !shown.textContent.includes(why)))) place.replaceChildren(line);
  };
  const ask = async (url, options) => {
    try { return await fetch(url, { redirect: "manual", signal: AbortSignal.timeout(10000), ...options }); } catch { return null; }
  };
  /** Return a page, parsed. `live`: whether the page that shows it follows it, so that no answer is a loss. */
  const load = async (url, live) => {
    const response = await ask(url, { headers: { "X-Live": "1" } });
    if (!response) lost();
    else if (response.type === "opaqueredirect") lost("You have been logged out", "load this page again to log in");
    else if (response.ok || !live) found();
    else lost(`The gateway answers ${response.status}`);
    if (!response?.ok) throw new Error(String(response?.status));
    return new DOMParser().parseFromString(await response.text(), "text/html");
  };
  // Ask first whether the gateway is there: the browser's own error page would take the form's fields with it.
  const passed = new WeakSet(), asking = new WeakSet();
  document.addEventListener("submit", async (event) => {
    const form = event.target;
    if (form.method !== "post" || passed.delete(form)) return;
    event.preventDefault();
    if (asking.has(form)) return;
    asking.add(form);
    const response = await ask(document.querySelector("link[rel=icon]").href, { cache: "no-store" });
    asking.delete(form);
    if (!response?.ok) { lost(AWAY, AGAIN, true); return; }
    passed.add(form);
    form.requestSubmit(event.submitter);
    passed.delete(form); // it was not valid
  });
  return { load, get isLost() { return since !== null; } };
})();
