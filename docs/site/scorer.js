// How the search of the site orders what it finds: as Sphinx does, but what explains stands before what records,
// and before both the page that people look for by these words (QUERIES of build.py).
var Scorer = {
  score: (result) => {
    const [page, , , , score] = result;
    const asked = new URLSearchParams(location.search).get("q") || "";
    const records = /^(docs\/decisions\/|docs\/benchmarks|tests|proto|CHANGELOG|CONTRIBUTING|reference\/calls|genindex)/;
    return score + (QUERIES[asked.trim().toLowerCase()] === page ? 1000 : records.test(page) ? -100 : 0);
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
