// Scores of search results, for Sphinx (`html_search_scorer`). Its own score of a page is that of the best word of the
// query alone, so that all pages with one of the words in a heading are equal, and the order is that of the alphabet.
// Here, each word counts: most in the title of the page, less in a heading, and least in the text.
var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,

  score: ([page, title, , , score, , kind]) => {
    if (kind === "title") return 4 * score; // the words of the query in this order, in a title or a heading
    if (kind !== "text") return score;
    const index = Search._index;
    const number = index.docnames.indexOf(page);
    const has = (terms, word) => Object.hasOwn(terms, word) && [terms[word]].flat().includes(number);
    const query = new URLSearchParams(window.location.search).get("q") || "";
    const [, words] = Search._parseQuery(query);
    const stemmer = new Stemmer();
    const ofTitle = new Set(splitQuery(title.toLowerCase()).map((word) => stemmer.stemWord(word)));
    let sum = 0;
    for (const word of words) {
      if (ofTitle.has(word)) sum += 20;
      else if (has(index.titleterms, word)) sum += 10;
      else if (has(index.terms, word)) sum += 3;
      else sum += 1;
    }
    const behind = /^(internals|design|format|reference\/cli|reference\/adapters)/.test(page);
    return behind ? sum / 2 : sum;
  },
};
