import { isWorker } from "./script.js";

if (isWorker) import("./graph/layout_worker.js");
else import("./page.js");
