"use strict";
// Without scripts the page is whole, only without copy buttons: they are shown here.
(function () {
  var said = document.getElementById("said");
  function old(text) {
    var area = document.createElement("textarea");
    area.value = text;
    area.className = "vh";
    document.body.appendChild(area);
    area.select();
    var done = document.execCommand("copy");
    area.remove();
    return done ? Promise.resolve() : Promise.reject(new Error("copying is not allowed"));
  }
  // A page opened as a file may lack the clipboard, or be refused it.
  function copy(text) {
    return navigator.clipboard ? navigator.clipboard.writeText(text).catch(function () { return old(text); }) : old(text);
  }
  document.querySelectorAll(".repeat button").forEach(function (button) {
    button.hidden = false;
    button.addEventListener("click", function () {
      var code = button.parentNode.querySelector("code");
      copy(code.textContent).then(
        function () { button.textContent = "Copied"; said.textContent = "Command copied"; },
        function () {
          window.getSelection().selectAllChildren(code);
          button.textContent = "Selected";
          said.textContent = "Command selected; copy it with the keyboard";
        }
      ).then(function () {
        setTimeout(function () { button.textContent = "Copy"; said.textContent = ""; }, 1800);
      });
    });
  });
})();
