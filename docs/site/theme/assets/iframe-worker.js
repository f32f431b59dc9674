// A page opened from disk may not start a worker, and the search of this site is one. Here its script runs in an empty
// frame of the page instead, with the same two functions: postMessage goes out, "message" events come in.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(address) {
      super();
      this.waiting = [];
      const start = () => {
        this.frame = document.createElement("iframe");
        this.frame.hidden = true;
        this.frame.title = "search";
        document.body.append(this.frame);
        const inside = this.frame.contentWindow;
        inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
        const script = inside.document.createElement("script");
        script.src = String(address);
        script.onload = () => {
          const waiting = this.waiting;
          this.waiting = null;
          waiting.forEach((data) => this.postMessage(data));
        };
        script.onerror = () => this.dispatchEvent(new Event("error"));
        inside.document.head.append(script);
      };
      if (document.body) start();
      else document.addEventListener("DOMContentLoaded", start);
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }

    terminate() {
      this.frame?.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}
