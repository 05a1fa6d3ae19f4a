// The site's search runs in a web worker, which browsers refuse to pages that are opened as files.
// There this class stands in for a worker: it runs the worker's script in a hidden frame.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inside = this.frame.contentWindow
      inside.postMessage = data => {
        const event = new MessageEvent("message", { data })
        this.dispatchEvent(event)
        this.onmessage?.(event)
      }
      inside.importScripts = (...urls) => Promise.all(urls.map(each => load(inside, new URL(each, url))))
      this.ready = load(inside, url)
    }
    async postMessage(data) {
      await this.ready
      const inside = this.frame.contentWindow
      const event = new inside.MessageEvent("message", { data })
      inside.dispatchEvent(event)
      inside.onmessage?.(event)
    }
    terminate() {
      this.frame.remove()
    }
  }

function load(inside, url) {
  return new Promise((resolve, reject) => {
    const script = inside.document.createElement("script")
    script.src = url
    script.onload = resolve
    script.onerror = reject
    inside.document.body.append(script)
  })
}
