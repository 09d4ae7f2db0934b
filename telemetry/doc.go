// Package telemetry tells operators what was decided: metrics, log lines and events.
//
// Nothing a client chooses becomes a metric label or an unbounded number of log lines. A request
// costs two atomic additions per zone; everything dearer happens when Prometheus asks, or on the
// few refusals that are logged.
package telemetry
