// Command extender is the yardstick for prioritize latency: it decodes a request into the types that
// every Go extender uses and answers at once, the same score for every node. The first line of its
// output is the address that it listens on.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"log"
	"net"
	"net/http"

	extender "k8s.io/kube-scheduler/extender/v1"
)

const score = 5

func prioritize(w http.ResponseWriter, r *http.Request) {
	var args extender.ExtenderArgs
	if err := json.NewDecoder(r.Body).Decode(&args); err != nil || args.Pod == nil || args.NodeNames == nil {
		http.Error(w, fmt.Sprintf("expected ExtenderArgs with a Pod and NodeNames: %v", err), http.StatusBadRequest)
		return
	}
	priorities := make(extender.HostPriorityList, 0, len(*args.NodeNames))
	for _, name := range *args.NodeNames {
		priorities = append(priorities, extender.HostPriority{Host: name, Score: score})
	}
	w.Header().Set("Content-Type", "application/json")
	if err := json.NewEncoder(w).Encode(priorities); err != nil {
		log.Printf("the answer for pod %s/%s was not sent: %v", args.Pod.Namespace, args.Pod.Name, err)
	}
}

func main() {
	listen := flag.String("listen", "127.0.0.1:0", "address of the extender; port 0 takes a free one")
	flag.Parse()
	listener, err := net.Listen("tcp", *listen)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(listener.Addr())
	http.HandleFunc("POST /prioritize", prioritize)
	http.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	log.Fatal(http.Serve(listener, nil))
}
