// What an empty chat offers: a click sends it.

const DEMO = [
  ["A sum", "What is 37 + 48?"],
  ["A capital", "What is the capital of Italy?"],
  ["A tool call", "What is the weather in Rome?", "weather"],
  ["JSON", "Anna is 34 years old and lives in Rome."],
]; // what the built-in model has learned

const ANY = [
  ["Code", "Write a Python function that merges two sorted lists, with a short test."],
  ["A table", "Compare TCP and UDP in a table."],
  ["A tool call", "What is the weather in Rome?", "weather"],
  ["An explanation", "Explain continuous batching in five sentences."],
];

export function examples(model, choose) {
  return (model === "demo" ? DEMO : ANY).map(([title, text, tool]) => {
    const button = document.createElement("button");
    button.type = "button";
    const head = document.createElement("b");
    head.textContent = title;
    const body = document.createElement("span");
    body.textContent = text;
    button.append(head, body);
    button.addEventListener("click", () => choose(text, tool));
    return button;
  });
}
