"use strict";
for (const code of document.querySelectorAll("code.copied")) {
  const button = document.createElement("button");
  button.type = "button"; button.className = "copy"; button.textContent = "Copy"; button.ariaLabel = "Copy " + (code.textContent || "the command");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
    } catch {  // a browser that lets no page write to the clipboard: the text is selected
      getSelection().selectAllChildren(code);
      button.textContent = "Selected";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
  code.after(" ", button);
}
