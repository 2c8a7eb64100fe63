// Positions of boxes by dagre. Runs in a worker where there is one.
import dagre from "@dagrejs/dagre";

/** boxes: [{id, width, height, parent}], groups: [{id, parent, width}], edges: [{source, target, width}] */
export function laidOut({ boxes, groups, edges }) {
  const graph = new dagre.graphlib.Graph({ compound: true, multigraph: false });
  graph.setGraph({ rankdir: "TB", nodesep: 18, ranksep: 46, edgesep: 12, marginx: 12, marginy: 12 });
  graph.setDefaultEdgeLabel(() => ({}));
  for (const { id, width } of groups) graph.setNode(String(id), { width, height: 0 });
  for (const { id, width, height } of boxes) graph.setNode(String(id), { width, height });
  for (const { id, parent } of [...groups, ...boxes]) if (parent !== null) graph.setParent(String(id), String(parent));
  for (const { source, target, width } of edges) {
    graph.setEdge(String(source), String(target), width ? { width, height: 14, labelpos: "c" } : {});
  }
  dagre.layout(graph);
  const place = ({ id }) => {
    const { x, y, width, height } = graph.node(String(id));
    return { id, x, y, width, height };
  };
  return {
    boxes: boxes.map(place),
    groups: groups.map(place),
    edges: edges.map(({ source, target }) => {
      const { points, x, y } = graph.edge(String(source), String(target));
      return { source, target, points, x, y };
    }),
    width: graph.graph().width,
    height: graph.graph().height,
  };
}
