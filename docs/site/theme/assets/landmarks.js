// The theme draws the copy button of each code block in a <nav> of its own without a name. To a screen reader that is a
// landmark for every block of code, which it is not.
const settle = () => {
  for (const nav of document.querySelectorAll("nav.md-code__nav:not([role])")) nav.setAttribute("role", "none")
}
new MutationObserver(settle).observe(document.documentElement, { childList: true, subtree: true })
settle()
