// Scores of search results, for Sphinx (`html_search_scorer`). Its own score of a page is that of the best word of the
// query alone, so that all pages with one of the words in a heading are equal, and the order is that of the alphabet.
// Here, each word counts: most in the title of the page, less in another heading, and least in the text. And a page
// comes first if one of its headings, or of the phrases in search.toml, has most of the words together.
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
    if (kind === "title") return 4 * score; // the words of the query in this order, in a heading
    if (kind !== "text") return score;
    const index = Search._index;
    const number = index.docnames.indexOf(page);
    const query = wordsOf(new URLSearchParams(window.location.search).get("q") || "");
    const ofTitle = wordsOf(title);
    const has = (terms, word) => Object.hasOwn(terms, word) && [terms[word]].flat().includes(number);
    let sum = 0;
    for (const word of query) {
      if (ofTitle.has(word)) sum += 12;
      else if (has(index.titleterms, word)) sum += 6;
      else if (has(index.terms, word)) sum += 3;
    }
    const weight = /^(internals|design|format|reference\/adapters)/.test(page) ? 0.5 : page === "guides/faq" ? 0.85 : 1;
    return weight * (sum / query.size + 60 * bestPhrase(query, number));
  },
};

const wordsOf = (text) => {
  const stemmer = new Stemmer();
  const words = splitQuery(text.toLowerCase()).filter((word) => !stopwords.has(word));
  return new Set(words.map((word) => stemmer.stemWord(word)));
};

// Share of the query's words in the best phrase of a page, and less if the phrase has many other words.
const bestPhrase = (query, number) => {
  let best = 0;
  for (const words of phrasesOf(number)) {
    const common = [...query].filter((word) => words.has(word)).length;
    best = Math.max(best, (common / query.size) * (0.6 + (0.4 * common) / words.size));
  }
  return best;
};

let phrases = null;
const phrasesOf = (number) => {
  if (phrases === null) {
    phrases = new Map();
    for (const texts of [Search._index.alltitles, Search._index.indexentries])
      for (const [text, places] of Object.entries(texts))
        for (const [page] of places) {
          if (!phrases.has(page)) phrases.set(page, []);
          phrases.get(page).push(wordsOf(text));
        }
  }
  return phrases.get(number) || [];
};
