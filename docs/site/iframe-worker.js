// A page that was opened from the disk may start no Worker. There, this one runs the worker's script
// in a hidden frame instead: the search of the theme needs no more.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      const inside = frame.contentWindow
      // Scripts that the worker imports are loaded one after the other.
      inside.importScripts = (...urls) =>
        urls.map(one => String(new URL(one, url))).reduce(
          (before, one) => before.then(() => load(inside, one)), Promise.resolve())
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", {data}))
      this.inside = inside
      this.ready = load(inside, url)
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", {data})))
    }

    terminate() {
      this.inside.frameElement.remove()
    }
  }

  function load(inside, url) {
    return new Promise((done, failed) => {
      const script = inside.document.createElement("script")
      script.src = url
      script.onload = done
      script.onerror = failed
      inside.document.body.appendChild(script)
    })
  }
}
