import { laidOut } from "./layout.js";

onmessage = ({ data }) => {
  try {
    postMessage({ number: data.number, result: laidOut(data.asked) });
  } catch (error) {
    postMessage({ number: data.number, error: String(error) });
  }
};
