// Pictures that are dropped or pasted, until the next message takes them.
const MEBIBYTE = 2 ** 20;
const MOST_BYTES = 20 * MEBIBYTE; // the server's own limit may be lower

export class Pictures {
  // `note` is where the page says which files it did not take.
  constructor(shelf, note, drop, paste) {
    this.shelf = shelf;
    this.note = note;
    this.urls = [];
    paste.addEventListener("paste", (event) => {
      const pictures = [...(event.clipboardData?.files ?? [])].filter(isPicture);
      if (!pictures.length) return; // text, which the field takes
      event.preventDefault();
      this.add(pictures);
    });
    drop.addEventListener("dragover", (event) => {
      if (!event.dataTransfer.types.includes("Files")) return;
      event.preventDefault();
      drop.classList.add("over");
    });
    drop.addEventListener("dragleave", () => drop.classList.remove("over"));
    drop.addEventListener("drop", (event) => {
      drop.classList.remove("over");
      if (!event.dataTransfer.files.length) return; // text
      event.preventDefault(); // or the browser leaves the page for the file
      this.add(event.dataTransfer.files);
    });
  }

  get count() {
    return this.urls.length;
  }

  // Takes the pictures among the files, and says why it does not take the others.
  add(files) {
    const left = [];
    for (const file of files) {
      const why = refusal(file);
      if (why) {
        left.push(`${file.name || "The picture"} ${why}`);
        continue;
      }
      const reader = new FileReader();
      reader.addEventListener("load", () => { this.urls.push(reader.result); this.draw(); });
      reader.readAsDataURL(file);
    }
    this.say(left.join(" "));
  }

  say(text) {
    this.note.textContent = text;
  }

  put(urls) {
    this.urls = [...urls, ...this.urls];
    this.draw();
  }

  take() {
    const urls = this.urls;
    this.urls = [];
    this.say("");
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

function isPicture(file) {
  return file.type.startsWith("image/");
}

// Why a file is not taken; "" if it is.
function refusal(file) {
  if (!isPicture(file)) return "is no picture.";
  if (file.size <= MOST_BYTES) return "";
  return `has ${Math.ceil((10 * file.size) / MEBIBYTE) / 10} MiB; a picture may have at most ${MOST_BYTES / MEBIBYTE} MiB.`;
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
