"use strict";
(() => {
const $ = id => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const at = { board: 0, clip: 0, playing: false };

if (!data.clips.length || !data.boards.length) return;
$("watch").hidden = false;

const make = (tag, words = "", name = "") => {
  const element = document.createElement(tag);
  element.textContent = words;
  if (name) element.className = name;
  return element;
};
const films = () => [...document.querySelectorAll("#stage video")];

data.clips.forEach((clip, number) => {
  const option = make("option", `${number + 1}: ${clip.prompt}`);
  option.value = number;
  $("clip").append(option);
});
data.boards.forEach((board, number) => {
  const button = make("button", board.title);
  button.type = "button";
  button.setAttribute("role", "radio");
  button.addEventListener("click", () => { at.board = number; show(); });
  $("totals").append(button);
});
$("totals").addEventListener("keydown", event => {
  const move = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (!move) return;
  event.preventDefault();
  at.board = (at.board + move + data.boards.length) % data.boards.length;
  show();
  $("totals").children[at.board].focus();
});

function show() {
  [...$("totals").children].forEach((button, number) => {
    button.setAttribute("aria-checked", number === at.board);
    button.tabIndex = number === at.board ? 0 : -1;
  });
  $("clip").value = at.clip;
  $("clip-name").textContent = `clip ${at.clip + 1} of ${data.clips.length}`;
  $("prompt-text").textContent = data.clips[at.clip].prompt;
  const figures = data.boards[at.board].runs.map(run => {
    const figure = make("figure");
    const caption = make("figcaption");
    const film = run.films[at.clip];
    if (film) {
      const video = make("video");
      Object.assign(video, { muted: true, loop: true, playsInline: true, preload: "auto" });
      video.src = $(film).textContent;
      figure.append(video);
    } else {
      figure.append(make("div", "no clip here", "none"));
    }
    const psnr = run.psnr[at.clip];
    caption.append(make("span", run.name, "who"));
    caption.append(make("span", psnr == null ? "" : `${psnr.toFixed(1)} dB`, "value"));
    figure.append(caption);
    return figure;
  });
  $("stage").replaceChildren(...figures);
  const first = films()[0];
  if (first) first.addEventListener("timeupdate", () => {
    if (first.duration) $("time").value = 1000 * first.currentTime / first.duration;
  });
  $("time").value = 0;
  play(at.playing);
}

/* All films begin together: each time from where the first one is. */
function play(on) {
  at.playing = on;
  $("play").setAttribute("aria-label", on ? "Pause" : "Play");
  const rate = Number($("speed").value);
  for (const film of films()) {
    film.playbackRate = rate;
    film.currentTime = films()[0].currentTime;
    if (on) film.play().catch(() => {}); else film.pause();
  }
}
const move = by => { at.clip = (at.clip + by + data.clips.length) % data.clips.length; show(); };
$("play").addEventListener("click", () => play(!at.playing));
$("speed").addEventListener("change", () => play(at.playing));
$("previous").addEventListener("click", () => move(-1));
$("next").addEventListener("click", () => move(1));
$("clip").addEventListener("change", event => { at.clip = Number(event.target.value); show(); });
$("time").addEventListener("input", event => {
  for (const film of films()) {
    if (film.duration) film.currentTime = film.duration * event.target.value / 1000;
  }
});
document.addEventListener("keydown", event => {
  if (event.target.closest("select, input, [role=radio]")) return;
  if (event.key === " " && event.target.id !== "play") { event.preventDefault(); play(!at.playing); }
  if (event.key === "[") move(-1);
  if (event.key === "]") move(1);
});
show();
})();
