"use strict";
// Asks for the page that is shown again and again, and takes over what is new. The content security
// policy lets no other script run, so what a page holds is only shown.
const WAIT_MS = 500;
let tag = null;

function states(root) {
  const opened = [...root.querySelectorAll("details")].map((one) => one.open);
  const checked = new Set([...root.querySelectorAll("input:checked")].map((one) => one.value));
  return { opened, checked };
}

function takeOver(text) {
  const fresh = new DOMParser().parseFromString(text, "text/html").querySelector("main");
  const shown = document.querySelector("main");
  if (fresh === null) return;
  const { opened, checked } = states(shown);
  fresh.querySelectorAll("details").forEach((one, i) => { one.open = opened[i] ?? false; });
  fresh.querySelectorAll("input").forEach((one) => { one.checked = checked.has(one.value); });
  shown.replaceWith(document.adoptNode(fresh));
}

function sayLost(isLost) {
  document.querySelector("#lost")?.remove();
  if (!isLost) return;
  const said = document.createElement("p");
  said.id = "lost";
  said.className = "lost";
  said.textContent = "The board does not answer; this page is as it was last.";
  document.body.prepend(said);
}

// A page stands still while a film plays on it: to take over another would begin the film anew.
function isFilmPlaying() {
  return [...document.querySelectorAll("video")].some((one) => !one.paused && !one.ended);
}

async function look() {
  try {
    if (!document.hidden && !isFilmPlaying()) {
      const headers = tag === null ? {} : { "If-None-Match": tag };
      const reply = await fetch(location.href, { headers, cache: "no-store" });
      if (reply.status === 200) {
        tag = reply.headers.get("ETag");
        takeOver(await reply.text());
      }
      sayLost(false);
    }
  } catch {
    sayLost(true);
  }
  setTimeout(look, WAIT_MS);
}

setTimeout(look, WAIT_MS);
