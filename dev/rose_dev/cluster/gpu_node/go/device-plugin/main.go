// A device plugin for nvidia.com/gpu over the kubelet's own API: GPUs and their health as NVML has
// them, handed out as CDI devices. NVIDIA's own plugin is not on the module proxy.
package main

import (
	"context"
	"flag"
	"log"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	v1 "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

const (
	resource = "nvidia.com/gpu"
	kind     = "nvidia.com/gpu" // of the CDI devices
	endpoint = "rose-gpu.sock"
	period   = time.Second // how soon a lost GPU is unhealthy
)

type plugin struct {
	v1.UnimplementedDevicePluginServer
	uuids []string
}

func (p *plugin) GetDevicePluginOptions(context.Context, *v1.Empty) (*v1.DevicePluginOptions, error) {
	return &v1.DevicePluginOptions{}, nil
}

// ListAndWatch says which GPUs answer, at once and whenever that changes.
func (p *plugin) ListAndWatch(_ *v1.Empty, stream v1.DevicePlugin_ListAndWatchServer) error {
	var before []string
	ticker := time.NewTicker(period)
	defer ticker.Stop()
	for {
		devices, states := p.look()
		if !reflect.DeepEqual(states, before) {
			log.Printf("devices: %v", states)
			if err := stream.Send(&v1.ListAndWatchResponse{Devices: devices}); err != nil {
				return err
			}
			before = states
		}
		select {
		case <-stream.Context().Done():
			return nil
		case <-ticker.C:
		}
	}
}

func (p *plugin) look() ([]*v1.Device, []string) {
	var devices []*v1.Device
	var states []string
	for _, uuid := range p.uuids {
		health := v1.Healthy
		device, code := nvml.DeviceGetHandleByUUID(uuid)
		if code == nvml.SUCCESS {
			_, code = device.GetMemoryInfo()
		}
		if code != nvml.SUCCESS {
			health = v1.Unhealthy
		}
		devices = append(devices, &v1.Device{ID: uuid, Health: health})
		states = append(states, uuid+" "+health)
	}
	return devices, states
}

func (p *plugin) Allocate(_ context.Context, asked *v1.AllocateRequest) (*v1.AllocateResponse, error) {
	answer := &v1.AllocateResponse{}
	for _, one := range asked.ContainerRequests {
		given := &v1.ContainerAllocateResponse{}
		for _, id := range one.DevicesIds {
			given.CdiDevices = append(given.CdiDevices, &v1.CDIDevice{Name: kind + "=" + id})
		}
		answer.ContainerResponses = append(answer.ContainerResponses, given)
	}
	return answer, nil
}

// serve offers the plugin and registers it; returns when the kubelet has made its socket anew.
func serve(p *plugin, dir string) error {
	path := filepath.Join(dir, endpoint)
	os.Remove(path)
	listener, err := net.Listen("unix", path)
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	v1.RegisterDevicePluginServer(server, p)
	go server.Serve(listener)
	defer server.Stop()
	kubelet := filepath.Join(dir, "kubelet.sock")
	registered, err := os.Stat(kubelet)
	if err != nil {
		return err
	}
	client, err := grpc.NewClient("unix://"+kubelet, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	request := &v1.RegisterRequest{Version: v1.Version, Endpoint: endpoint, ResourceName: resource}
	if _, err := v1.NewRegistrationClient(client).Register(ctx, request); err != nil {
		return err
	}
	log.Printf("registered %d of %s", len(p.uuids), resource)
	for {
		time.Sleep(period)
		now, err := os.Stat(kubelet)
		if err != nil || !os.SameFile(registered, now) {
			return err
		}
	}
}

func main() {
	dir := flag.String("dir", v1.DevicePluginPath, "the kubelet's folder of device plugins")
	library := flag.String("library", "libnvidia-ml.so.1", "NVML")
	flag.Parse()
	nvml.SetLibraryOptions(nvml.WithLibraryPath(*library))
	if code := nvml.Init(); code != nvml.SUCCESS {
		log.Fatalf("NVML: %v", code)
	}
	count, code := nvml.DeviceGetCount()
	if code != nvml.SUCCESS {
		log.Fatalf("NVML: %v", nvml.ErrorString(code))
	}
	p := &plugin{}
	for index := 0; index < count; index++ {
		device, code := nvml.DeviceGetHandleByIndex(index)
		if code != nvml.SUCCESS {
			log.Printf("GPU %d: %v", index, nvml.ErrorString(code))
			continue
		}
		uuid, code := device.GetUUID()
		if code == nvml.SUCCESS {
			p.uuids = append(p.uuids, uuid)
		}
	}
	for {
		if err := serve(p, *dir); err != nil {
			log.Printf("waiting for the kubelet: %v", err)
		}
		time.Sleep(period)
	}
}
