package cshardweave

// #include "shim.h"
import "C"

// MetricsWriter is a handle.
type MetricsWriter = *C.swv_metrics_writer

func MetricsWriterOpenJSONLines(path string) (MetricsWriter, error) {
	if err := checkText("path", path); err != nil {
		return nil, err
	}
	var a arena
	defer a.free()
	var out MetricsWriter
	err := result(C.swv_metrics_writer_open_json_lines(a.text(path), &out))
	return out, err
}

func MetricsWriterCreateEvents(folder string, firstStep int64) (MetricsWriter, error) {
	if err := checkText("folder", folder); err != nil {
		return nil, err
	}
	var a arena
	defer a.free()
	var out MetricsWriter
	err := result(C.swv_metrics_writer_create_events(a.text(folder), C.int64_t(firstStep), &out))
	return out, err
}

func MetricsWriterFree(w MetricsWriter) { C.swv_metrics_writer_free(w) }

func MetricsWriterWrite(w MetricsWriter, step int64, names []string, values []float64) error {
	if err := checkText("a name", names...); err != nil {
		return err
	}
	var a arena
	defer a.free()
	return result(C.swvgo_metrics_writer_write(w, C.int64_t(step), a.list(names), (*C.double)(first(values)), C.size_t(len(values))))
}

func MetricsWriterFlush(w MetricsWriter) error { return result(C.swv_metrics_writer_flush(w)) }
