"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const numbers = head.classList.contains("number");
      const before = head.getAttribute("aria-sort");
      const up = before ? before === "descending" : !numbers;
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const value = (row) => {
        const cell = row.cells[column];
        return numbers ? BigInt(cell.dataset.value) : cell.textContent.trim();
      };
      const body = table.tBodies[0];
      const rows = [...body.rows].map((row) => [value(row), row]);
      rows.sort(([one], [other]) => (numbers ? (one < other ? -1 : one > other ? 1 : 0) : one.localeCompare(other)));
      if (!up) rows.reverse();
      body.append(...rows.map(([, row]) => row));
    });
  });
}
