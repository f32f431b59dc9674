// "What am I looking at?": each view in plain words.

import { el } from "../page/dom.js";

const WORDS = {
  heads: [
    "A language model reads your prompt token by token (a token is a word or a piece of one). In each layer, several attention heads look back: at every token, a head decides from which earlier tokens it takes something along. How much it takes from each are its attention weights; they add up to 1.",
    "Each small square is one head: rows are the tokens that look, columns the tokens they look at, and the stronger the colour of a cell, the more attention (the scale is above the grid). A strong left edge is a head that mostly looks at the first token, which is its way of doing nothing (a sink). A strong line just below the diagonal looks at the token before.",
    "Click a square to see that head with its tokens, then a cell to ask why: which few channels of the head matched the two tokens, which components had written what they matched, and what the head carried over. ×0, ×½ and ×2 take such a thing away, halve or double it, in the running model.",
  ],
  circuit: [
    "A circuit answers: why this answer? It begins with the answer at the top and goes back to the tokens at the bottom. Boxes are heads and MLPs at a token, lines are what one of them wrote and another one read.",
    "“Attention” follows why heads attend where they do: blue lines made a query (what a token looks for), orange lines a key (what a token offers). “Complete” also follows what is moved, in green, with its share of the answer: the logit of the answer minus that of the wrong one, or the likelihood of the answer if you give no wrong one.",
    "Click a box or a line, then ×0, ×½ or ×2: the model is run again with that change, and its answers are shown beside those it gave before.",
  ],
  beside: [
    "Two circuits side by side: of two prompts, or of one prompt in two models. Lines in grey are in both; lines in colour are only in that one. If the prompts are the same, they are matched by component and position, otherwise by component alone.",
    "A good second prompt differs from the first in one thing: the names swapped, or one word replaced. What changes in the circuit is then about that thing.",
  ],
  run: [
    "A run is a folder of circuits of many prompts. The map shows how alike each two of them are: strong colours are pairs with much in common, and the blocks along the diagonal are families, coloured at the edge.",
    "Click a cell to open the two circuits it compares, or a cell of the diagonal to open one. The representative of a family is the circuit that is most like all others in it.",
  ],
};

export function createHelp() {
  const words = el("div", { class: "help-words" });
  const place = el("details", { class: "help" }, el("summary", {}, "What am I looking at?"), words);
  return { place, update: ({ view }) => words.replaceChildren(...WORDS[view].map((text) => el("p", {}, text))) };
}
