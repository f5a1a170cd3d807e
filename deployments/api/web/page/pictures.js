// Pictures that are dropped or pasted, until the next message takes them.
const MOST_BYTES = 20 * 2 ** 20; // the server's own limit may be lower

export class Pictures {
  constructor(shelf, drop, paste) {
    this.shelf = shelf;
    this.urls = [];
    paste.addEventListener("paste", (event) => {
      if (this.add(event.clipboardData?.files)) event.preventDefault();
    });
    drop.addEventListener("dragover", (event) => {
      if (!event.dataTransfer.types.includes("Files")) return;
      event.preventDefault();
      drop.classList.add("over");
    });
    drop.addEventListener("dragleave", () => drop.classList.remove("over"));
    drop.addEventListener("drop", (event) => {
      drop.classList.remove("over");
      if (this.add(event.dataTransfer.files)) event.preventDefault();
    });
  }

  get count() {
    return this.urls.length;
  }

  // Whether there is a picture among the files.
  add(files) {
    const pictures = [...(files ?? [])].filter((file) => file.type.startsWith("image/") && file.size <= MOST_BYTES);
    for (const file of pictures) {
      const reader = new FileReader();
      reader.addEventListener("load", () => { this.urls.push(reader.result); this.draw(); });
      reader.readAsDataURL(file);
    }
    return pictures.length > 0;
  }

  put(urls) {
    this.urls = [...urls, ...this.urls];
    this.draw();
  }

  take() {
    const urls = this.urls;
    this.urls = [];
    this.draw();
    return urls;
  }

  draw() {
    this.shelf.replaceChildren(...this.urls.map((url, place) => {
      const button = document.createElement("button");
      button.type = "button";
      button.title = "Remove";
      button.append(thumbnail(url));
      button.addEventListener("click", () => { this.urls.splice(place, 1); this.draw(); });
      return button;
    }));
    this.shelf.hidden = !this.urls.length;
  }
}

export function thumbnail(url) {
  const image = document.createElement("img");
  image.src = url;
  image.alt = "Picture";
  return image;
}

// A message's content: its text alone, or its pictures before the text.
export function content(text, urls) {
  if (!urls.length) return text;
  const parts = urls.map((url) => ({ type: "image_url", image_url: { url } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

export function split(content) {
  if (typeof content === "string") return { text: content, urls: [] };
  return {
    text: content.filter((part) => part.type === "text").map((part) => part.text).join("\n"),
    urls: content.filter((part) => part.type === "image_url").map((part) => part.image_url.url),
  };
}
