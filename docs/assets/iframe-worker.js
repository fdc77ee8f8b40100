// A page that was opened as a file may not start a worker, and search is one. Here it runs in a hidden frame instead.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.body.appendChild(document.createElement("iframe"));
      this.frame.hidden = true;
      const inside = this.frame.contentWindow;
      window.addEventListener("message", (this.hear = event => {
        if (event.source !== inside) return;
        const message = new MessageEvent("message", { data: event.data });
        this.dispatchEvent(message);
        this.onmessage?.(message);
      }));
      inside.document.open();
      inside.document.write(
        `<script>postMessage = data => parent.postMessage(data, "*");
           importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((done, fail) => {
             const script = document.createElement("script");
             Object.assign(script, { src: url, onload: done, onerror: fail });
             document.body.appendChild(script);
           })), Promise.resolve())<\/script><body><script src="${url}"><\/script>`);
      inside.document.close();
      this.ready = new Promise(done => (inside.onload = done));
    }
    postMessage(data) {
      this.ready.then(() =>
        this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) })));
    }
    terminate() {
      this.frame.remove();
      window.removeEventListener("message", this.hear);
    }
  };
