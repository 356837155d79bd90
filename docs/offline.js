// Search in pages that are opened as files. Browsers allow no workers there, so a hidden frame runs the worker's script.
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      const inner = (this.inner = frame.contentWindow);
      inner.document.open();
      inner.answer = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.ready = new Promise((done) => (inner.ready = done));
      inner.load = (urls) =>
        urls.reduce(
          (before, address) =>
            before.then(
              () =>
                new Promise((done) => {
                  const script = inner.document.createElement("script");
                  script.src = address;
                  script.onload = done;
                  inner.document.body.appendChild(script);
                }),
            ),
          Promise.resolve(),
        );
      inner.document.write(
        `<body><script>postMessage = answer; importScripts = (...urls) => load(urls)</script>` +
          `<script src="${url}"></script><script>ready()</script></body>`,
      );
      inner.document.close();
    }
    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(new this.inner.MessageEvent("message", { data })));
    }
    terminate() {}
  };
}
